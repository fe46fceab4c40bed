"""All that one instance process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from epd_serve.types import KVMode, Role

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVTransport = Literal["auto", "shm", "tcp", "mooncake"]
FeatureStoreKind = Literal["embedded", "mooncake"]
MooncakeProtocol = Literal["auto", "tcp", "rdma", "ascend"]
FeaturePrefetch = Literal["async", "sync"]
BatchingOrder = Literal["fcfs", "sjf", "slack"]
BatchingPolicy = Literal["stage-level", "unlimited"]
BatchingEncodes = Literal["concurrent", "after-prefill"]
Switch = Literal["auto", "on", "off"]

MEBIBYTE = 1024**2
#: What a process must lend to Mooncake Store at least.
MIN_SEGMENT_BYTES = 16 * MEBIBYTE


@dataclass(frozen=True, kw_only=True)
class InstanceOptions:
    """One instance; each field is the flag of the same name of ``epd-serve instance``.

    Attributes:
        name: unique in the deployment (``e0``).
        model: directory of a transformers model.
        served_model_name: what clients call the model.
        port: of the control server; its URL is ``http://host:port``.
        device: ``cpu``, ``cuda:0``, ``npu:1``; indices count the devices that the process can see. Several, with
            commas between them, share the language model (tensor parallelism).
        generation_config: whence sampling comes that a request leaves open: ``auto``, the model's
            generation_config.json; ``off``: from nowhere; or the directory of another such file.
        threads: compute threads on the CPU; None leaves the choice to the library.
        share, share_start: the part of the device that the instance keeps to, and where it begins, as fractions of
            1; None: no limit.
        memory_share: the part of an accelerator's memory; None: as ``share``.
        stream_priority: of the tower's stream, a lower number is served first; on a CPU the tower's niceness.
        device_board: ``path:slot`` of the file in which the instances on one device tell each other what they do;
            None where no other is there.
        block_size: tokens per KV block; None: what suits the device (:attr:`tokens_per_block`).
        num_blocks, kv_cache_bytes: size of the KV pool, given as one or the other; both None: the instance
            chooses.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most sequences in a step.
        async_scheduling: whether a step is launched before the tokens of the one before are known; ``auto``: on an
            accelerator. The ranks of a tensor-parallel instance cannot.
        max_model_len: longest prompt and answer together, in tokens; None: what the model allows.
        image_budget_pixels: most pixels encoded in a step, as the model's processor leaves them; a larger image
            is encoded alone.
        feature_store_bytes: what E keeps of its encoder output, for P to fetch.
        feature_cache_bytes: what P keeps of the features it has fetched.
        feature_batch, feature_batch_ms: features that E announces to a P together, and for how many milliseconds
            it collects them; 1: each at once.
        media_cpu_s: seconds of CPU time that decoding one picture may take; more, and it is refused.
        feature_timeout_s: how long P waits for a feature before it computes it itself.
        queue_timeout_s: how long a request waits for room in D's KV cache before it is refused.
        lease_s: how long memory that a peer has not confirmed is kept for it.
        drain_s: how long requests in progress may go on after SIGTERM.
        kv_transport: how KV moves from P to D; ``auto`` is shared memory on one host, else TCP.
        feature_store: where E's features lie: in its own memory, or in Mooncake Store for all instances to find.
        mooncake_master: ``host:port`` of the store's master; needed with feature_store ``mooncake``.
        mooncake_protocol: of its transfer engine; ``auto`` is the device's most portable one.
        mooncake_devices: RDMA devices, with commas between them; None: all.
        mooncake_staging_bytes: registered memory through which bytes pass that lie elsewhere.
        kv_mode: how KV goes out: groups of layers, single layers, a whole prompt at its end, or D reads it.
        kv_group_layers: layers sent together in mode ``grouped``; None: chosen from measured times.
        feature_prefetch: ``async`` fetches a feature once it is announced, ``sync`` when a step needs it.
        slo_ttft_ms, slo_tpot_ms: milliseconds that a first token and each further one may take; None: no limit.
            With one, the instance measures at its start what fits in a step; encodes on the device of decodes
            keep to the latter.
        batching_alpha: share of slo_ttft_ms that a step may take on an instance that does not decode.
        batching_order: in which order waiting prompts are computed.
        batching_policy: ``unlimited`` ignores the SLO; the other options alone bound a step then.
        batching_encodes: whether encodes start while prompts are computed.
        steals: encodes come before steps of the language model, and gateways give it only prompts that it takes
            from the queues of others.
        link_bandwidth, link_latency_ms: bytes per second and milliseconds for each transfer that links between
            instances are slowed down to, for experiments; None and 0: not at all.
        switch_dir: where its settings in other roles are found, and its role is kept for when it is started again
            (:mod:`epd_serve.config.role_files`); None: it is not kept.
        join: admin plane of a gateway that it joins once it is ready; None: whoever started it tells the gateway.
        trace: directory for the file that says what the instance did when; None: none is written.
    """

    name: str
    role: Role
    model: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8100
    device: str = "cpu"
    dtype: DType = "auto"
    generation_config: str = "auto"
    threads: int | None = None
    share: float | None = None
    share_start: float = 0.0
    memory_share: float | None = None
    stream_priority: int = 0
    device_board: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    async_scheduling: Switch = "auto"
    max_model_len: int | None = None
    image_budget_pixels: int = 8 * MEBIBYTE
    feature_store_bytes: int = 256 * MEBIBYTE
    feature_cache_bytes: int = 256 * MEBIBYTE
    feature_batch: int = 1
    feature_batch_ms: float = 500.0
    media_cpu_s: float = 2.0
    feature_timeout_s: float = 30.0
    queue_timeout_s: float = 60.0
    lease_s: float = 30.0
    drain_s: float = 30.0
    kv_transport: KVTransport = "auto"
    feature_store: FeatureStoreKind = "embedded"
    mooncake_master: str | None = None
    mooncake_protocol: MooncakeProtocol = "auto"
    mooncake_devices: str | None = None
    mooncake_staging_bytes: int = 256 * MEBIBYTE
    kv_mode: KVMode = "grouped"
    kv_group_layers: int | None = None
    feature_prefetch: FeaturePrefetch = "async"
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    batching_alpha: float = 0.5
    batching_order: BatchingOrder = "fcfs"
    batching_policy: BatchingPolicy = "stage-level"
    batching_encodes: BatchingEncodes = "concurrent"
    steals: bool = False
    link_bandwidth: int | None = None
    link_latency_ms: float = 0.0
    switch_dir: Path | None = None
    join: str | None = None
    trace: Path | None = None

    @property
    def devices(self) -> list[str]:
        """The devices of the instance, one for each tensor-parallel rank; the first also runs the tower."""
        return self.device.split(",")

    @property
    def tokens_per_block(self) -> int:
        """``block_size``, or 128 on an NPU, whose paged prefill takes no less, and 16 elsewhere."""
        return self.block_size or (128 if self.device.startswith("npu") else 16)

    @property
    def runs_ahead(self) -> bool:
        """Raises ValueError where it is to be on and cannot."""
        if self.async_scheduling == "on" and len(self.devices) > 1:
            raise ValueError(
                "async_scheduling: on needs one device for each instance, as the tokens of a step are fed to the "
                "next on the device that chose them; write auto or off for tensor-parallel instances"
            )
        if self.async_scheduling == "auto":
            return len(self.devices) == 1 and self.device != "cpu"
        return self.async_scheduling == "on"

    def to_arguments(self) -> list[str]:
        """The flags of ``epd-serve instance`` that mean the same as this object."""
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool):
                arguments += [f"--{field.name.replace('_', '-')}"] * value
            elif value is not None:
                arguments += [f"--{field.name.replace('_', '-')}", str(value)]
        return arguments


def decode_graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes at which decode steps are captured: powers of two, and the largest."""
    return [*(1 << i for i in range((max_num_seqs - 1).bit_length())), max_num_seqs]
