"""An instance's account of itself, and the orders that it takes: messages of :mod:`epd_serve.protocol.wire`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from epd_serve.protocol.wire import Count, Message, Name, Number, NumParameters, Text
from epd_serve.types import StageRate


class Load(Message, frozen=True):
    """An instance's load, for routing. It counts everything that was received, from whichever gateway.

    Attributes:
        num_waiting_tokens: tokens of prompts not computed yet; an estimate for prompts that are still text.
        num_waiting_encodes: open encode calls; equal items count for each of them.
        num_waiting_pixels: pixels of distinct items that are not encoded yet.
        num_expected: sequences that will be decoded here once their prompts are computed elsewhere.
        num_refused: of these, the sequences that have asked for a place here and wait for one.
        mean_output_tokens: of sequences that ended here lately; 0: none has.
        tokens_per_character: of prompts lately; 0: there was none.
        rates: measured rates by stage ("E", "P", "D"); a stage that has not worked yet is missing.
    """

    num_running: Count = 0
    num_waiting: Count = 0
    num_waiting_tokens: Count = 0
    num_waiting_encodes: Count = 0
    num_waiting_pixels: Count = 0
    num_expected: Count = 0
    num_refused: Count = 0
    free_blocks: Count = 0
    total_blocks: Count = 0
    mean_output_tokens: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    tokens_per_character: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 0.0
    rates: Annotated[dict[Name, StageRate], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=dict)


class Report(Message, frozen=True):
    """An instance's state at one moment.

    Attributes:
        received: stage and request id (``"P" + request_id``) of each stage call that came since the last report to
            this caller, in the first report of all that are open: the load contains them, so that the caller need
            not count them itself any more.
        encoded: mm_hashes of features that came to be made here since then, in the first of the latest ones.
        epoch: as in InstanceInfo. A new one means that ``/info`` has changed, the role with it.
    """

    load: Load
    ready: bool = True
    received: list[str] = msgspec.field(default_factory=list)
    encoded: list[Name] = msgspec.field(default_factory=list)
    epoch: Count = 0


class AppliedShare(Message, frozen=True):
    """``part`` of a device, the strength of its enforcement ("isolated", "cooperative"), and the mechanisms."""

    part: Annotated[float, msgspec.Meta(ge=0, le=1)]
    strength: Name
    mechanisms: Annotated[list[Name], msgspec.Meta(max_length=64)]


class Usage(Message, frozen=True):
    """The seconds and bytes that an instance has used by ``at_s`` of its own clock.

    Attributes:
        busy_s: by stage; a step with prompts counts as prefill.
        device_bytes: in use on its accelerator, by whomever; 0 on a CPU.
    """

    at_s: Number = 0.0
    cpu_s: Number = 0.0
    memory_bytes: Count = 0
    device_bytes: Count = 0
    device_total_bytes: Count = 0
    busy_s: Annotated[dict[Name, Number], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=dict)


class InstanceInfo(Message, frozen=True):
    """An instance's identity and state, served as JSON at ``/info``.

    Attributes:
        media_fingerprint: hex name of everything but the media bytes that decides a feature: model revision,
            processor, dtype, shape version. It goes into each mm_hash.
        parameters: number of parameters held, by part ("tower", "language_model").
        share: part of the device that the instance keeps to; None: no limit.
        budgets: of a step, in tokens, sequences, pixels and milliseconds; found from the SLO where there is one.
        host_id: of the machine; equal where instances share memory.
        block_size: tokens per KV block; 0 where there is no KV cache.
        kv_token_bytes: bytes of one token's KV; 0 where there is no KV cache.
        tokens_per_pixel: of the model's features, about; a feature has ``feature_token_bytes`` for each token.
        epoch: number of times that this process has changed its role and made its caches anew.
        state: of its role, see :class:`epd_serve.instance.lifecycle.SwitchState`.
        modalities: that the model's tower takes; a model of text alone has none.
        producer: of its features: kind of device and operators.
        assists: it encodes, and takes requests of text only while the others' queue is long.
        splits_videos: its tower looks at each group of frames by itself, so that others may encode some of them.
    """

    name: Name
    role: Name
    url: Text
    model: Text
    model_path: Text
    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    media_fingerprint: Name
    device: Text
    dtype: Name
    pid: Count
    ready: bool
    load: Load
    parameters: Annotated[dict[Name, NumParameters], msgspec.Meta(max_length=64)] = msgspec.field(
        default_factory=dict
    )
    share: AppliedShare | None = None
    budgets: Annotated[dict[Name, Number], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    host_id: Name = ""
    block_size: Count = 0
    kv_token_bytes: Count = 0
    tokens_per_pixel: Annotated[float, msgspec.Meta(ge=0, le=1e3)] = 0.0
    feature_token_bytes: Count = 0
    epoch: Count = 0
    state: Name = "SERVING"
    modalities: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ("image",)
    usage: Usage | None = None
    assists: bool = False
    producer: Text = ""
    splits_videos: bool = False


class RoleOrder(Message, frozen=True):
    """Serve another role. While the instance drains, an order of its present role calls the order back.

    Attributes:
        deadline_s: time after which it gives up and serves its old role again.
        patience_s: time in which running answers may end here; then they go on elsewhere.
    """

    role: str
    deadline_s: float = 30.0
    patience_s: float = 1.0


class LeaveOrder(Message, frozen=True):
    """Take nothing new and end the work that is there; the times are those of :class:`RoleOrder`."""

    deadline_s: float = 30.0
    patience_s: float = 1.0


class Left(Message, frozen=True):
    """No request is left after ``seconds``; the process can be ended."""

    seconds: float


class RoleChanged(Message, frozen=True):
    """The instance serves its new role after ``seconds``; ``drain_s`` of these ended the old role's work."""

    old: str
    new: str
    epoch: int
    seconds: float
    drain_s: float = 0.0
