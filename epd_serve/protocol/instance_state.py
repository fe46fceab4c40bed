"""Instance state and lifecycle orders, carried by the calls of :mod:`epd_serve.protocol.wire`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from epd_serve.protocol.wire import Count, Message, Name, Number, NumParameters, Text
from epd_serve.types import StageRate

#: Variable with an instance's ``num_restarts``.
RESTARTS = "EPD_SERVE_RESTARTS"


class Load(Message, frozen=True):
    """An instance's load, for routing. It counts requests from all gateways.

    Attributes:
        num_waiting_tokens: uncomputed prompt tokens, estimated for prompts not tokenized yet.
        num_waiting_encodes: open encode calls, counting an item once for each call that wants it.
        num_waiting_pixels: pixels of distinct items not encoded yet.
        num_expected: sequences that will decode here once another instance has computed their prompts.
        num_refused: sequences among ``num_expected`` that wait for KV blocks here.
        mean_output_tokens: recent mean over finished sequences; 0 before the first.
        tokens_per_character: recent mean over prompts; 0 before the first.
        rates: measured rates by stage ("E", "P", "D"), without stages that have not run yet.
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
        received: stage and request id (``"P" + request_id``) of stage calls received since the last report to this
            caller; the first report lists the latest ones. ``load`` includes them, so the caller can stop counting
            them itself.
        encoded: mm_hashes of features encoded here since the last report; the first report lists the latest ones.
        epoch: as in InstanceInfo. A new epoch means that ``/info``, including the role, has changed.
    """

    load: Load
    ready: bool = True
    received: list[str] = msgspec.field(default_factory=list)
    encoded: list[Name] = msgspec.field(default_factory=list)
    epoch: Count = 0


class AppliedShare(Message, frozen=True):
    """Share ``part`` of a device, strength of its enforcement ("isolated", "cooperative"), and mechanisms."""

    part: Annotated[float, msgspec.Meta(ge=0, le=1)]
    strength: Name
    mechanisms: Annotated[list[Name], msgspec.Meta(max_length=64)]


class Usage(Message, frozen=True):
    """Resources that an instance has used by ``at_s`` on its own clock.

    Attributes:
        busy_s: compute seconds by stage; a step with prompts counts as prefill.
        device_bytes: bytes in use on its accelerator by all processes; 0 on a CPU.
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
        media_fingerprint: hex digest of everything except the media bytes that determines a feature: model
            revision, processor, dtype, shape version. Part of every mm_hash.
        parameters: number of loaded parameters, by part ("tower", "language_model").
        share: limit on the instance's share of the device; None if unlimited.
        budgets: step budgets in tokens, sequences, pixels and milliseconds; derived from the SLO if one is set.
        host_id: machine id; equal for instances that can share memory.
        block_size: tokens per KV block; 0 without a KV cache.
        kv_token_bytes: KV bytes per token; 0 without a KV cache.
        tokens_per_pixel: approximate feature tokens per pixel; a feature takes ``feature_token_bytes`` per token.
        epoch: number of times this process has switched roles and rebuilt its caches.
        num_restarts: number of processes that its supervisor started before this one.
        state: progress of a role switch (:class:`epd_serve.instance.lifecycle.SwitchState`).
        modalities: media that the tower accepts; empty for a text-only model.
        producer: kind of device and operators that compute its features.
        assists: it encodes, and takes text-only requests only while the other instances' queue is long.
        splits_videos: its tower encodes each group of frames independently, so instances can share a video.
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
    num_restarts: Count = 0
    state: Name = "SERVING"
    modalities: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ("image",)
    usage: Usage | None = None
    assists: bool = False
    producer: Text = ""
    splits_videos: bool = False


class RoleOrder(Message, frozen=True, forbid_unknown_fields=True):
    """Switch to another role. Ordering the current role while the instance drains cancels the switch.

    Attributes:
        deadline_s: time to drain before the instance gives up and keeps its old role.
        patience_s: time for running answers to finish here before they move to another instance.
    """

    role: str
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0
    patience_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 1.0


class LeaveOrder(Message, frozen=True):
    """Accept no new requests and drain, within the times of :class:`RoleOrder`."""

    deadline_s: float = 30.0
    patience_s: float = 1.0


class Left(Message, frozen=True):
    """The instance drained in ``seconds``; its process can be stopped."""

    seconds: float


class RoleChanged(Message, frozen=True):
    """The instance switched roles in ``seconds``, including ``drain_s`` to drain."""

    old: str
    new: str
    seconds: float
    drain_s: float = 0.0
