"""An instance's account of itself: once and whole at ``/info``, then in reports of changes.

Each number and text has bounds, which hold where a message is read: what routing computes with it stays finite.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from epd_serve.protocol.codec import Message
from epd_serve.types import StageRate

#: Far beyond what any instance has, and far below where sums and products overflow.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Number = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
NumParameters = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Load(Message, frozen=True):
    """An instance's load, for routing. It counts everything that was received, from whichever gateway.

    Attributes:
        num_waiting_tokens: tokens of prompts not computed yet; an estimate for prompts that are still text.
        num_waiting_encodes: open encode calls; equal items count for each of them.
        num_waiting_pixels: pixels of distinct items that are not encoded yet.
        num_expected: sequences that will be decoded here once their prompts are computed elsewhere.
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
        steals: it encodes, and gets prompts only by taking them from the queues of others.
        epoch: number of times that this process has changed its role and made its caches anew.
        state: of its role, see :class:`epd_serve.instance.lifecycle.SwitchState`.
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
    steals: bool = False
    epoch: Count = 0
    state: Name = "SERVING"
