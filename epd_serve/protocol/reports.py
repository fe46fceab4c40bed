"""What an instance says of itself: once and whole at ``/info``, then in reports of what has changed."""

from __future__ import annotations

import msgspec

from epd_serve.protocol.codec import Message
from epd_serve.types import StageRate


class Load(Message, frozen=True):
    """What an instance reports of itself, for routing. It counts all that was received, from whichever gateway.

    Attributes:
        num_waiting_tokens: of prompts, not computed yet; of prompts that are still text an estimate.
        num_waiting_encodes: open encode calls; equal items count for each of them.
        num_waiting_pixels: of distinct items that are not encoded yet.
        num_expected: sequences that will be decoded here once their prompts are computed elsewhere.
        mean_output_tokens: of sequences that ended here lately; 0: none has.
        tokens_per_character: of prompts lately; 0: there was none.
        rates: what was measured, by stage ("E", "P", "D"); a stage that has not worked yet is missing.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_waiting_encodes: int = 0
    num_waiting_pixels: int = 0
    num_expected: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    mean_output_tokens: float = 0.0
    tokens_per_character: float = 0.0
    rates: dict[str, StageRate] = msgspec.field(default_factory=dict)


class Report(Message, frozen=True):
    """An instance's state at one moment.

    Attributes:
        received: stage and request id (``"P" + request_id``) of each stage call that came since the last report to
            this caller, in the first report of all that are open: the load contains them, so that the caller need
            not count them itself any more.
        encoded: mm_hashes of features that came to be made here since then, in the first of the latest ones.
        epoch: as in InstanceInfo. Another one than before means that ``/info`` has changed, the role with it.
    """

    load: Load
    ready: bool = True
    received: list[str] = msgspec.field(default_factory=list)
    encoded: list[str] = msgspec.field(default_factory=list)
    epoch: int = 0


class AppliedShare(Message, frozen=True):
    """``part`` of a device, how far it is enforced ("isolated", "cooperative"), and by what."""

    part: float
    strength: str
    mechanisms: list[str]


class InstanceInfo(Message, frozen=True):
    """An instance's identity and state, served as JSON at ``/info``.

    Attributes:
        media_fingerprint: hex name of everything but the media bytes that decides a feature: model revision,
            processor, dtype, shape version. It goes into each mm_hash.
        parameters: number of parameters held, by part ("tower", "language_model").
        share: of the device, that the instance keeps to; None: no limit.
        budgets: of a step, in tokens, sequences, pixels and milliseconds; found from the SLO where there is one.
        host_id: of the machine; equal where instances share memory.
        block_size: tokens per KV block; 0 where there is no KV cache.
        kv_token_bytes: of the KV of one token, likewise.
        tokens_per_pixel: of the model's features, about; a feature has ``feature_token_bytes`` for each token.
        steals: it encodes, and gets prompts only by taking them from the queues of others.
        epoch: how often this process has changed its role; its caches were made anew with it.
        state: of its role, see :class:`epd_serve.topology.SwitchState`.
    """

    name: str
    role: str
    url: str
    model: str
    model_path: str
    max_model_len: int
    media_fingerprint: str
    device: str
    dtype: str
    pid: int
    ready: bool
    load: Load
    parameters: dict[str, int] = msgspec.field(default_factory=dict)
    share: AppliedShare | None = None
    budgets: dict[str, float] = msgspec.field(default_factory=dict)
    host_id: str = ""
    block_size: int = 0
    kv_token_bytes: int = 0
    tokens_per_pixel: float = 0.0
    feature_token_bytes: int = 0
    steals: bool = False
    epoch: int = 0
    state: str = "SERVING"
