"""Sections of the deployment file for instances, and those shared with the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from epd_serve.config.sizes import Bytes
from epd_serve.cost.shape import shape_of


class Section(BaseModel):
    """A section of the deployment file; one field is one option."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def resolved_path(path: Path, info: ValidationInfo) -> Path:
    """Make a path relative to the deployment file absolute."""
    directory: Path | None = (info.context or {}).get("directory")
    return path if directory is None else directory / path.expanduser()


#: A path relative to the deployment file.
FilePath = Annotated[Path, AfterValidator(resolved_path)]

RoleName = Literal["E", "P", "D", "EP", "ED", "PD", "EPD"]
ArgumentValue = bool | int | float | str

#: Flags of ``vllm serve`` set by the topology or other keys, with the key to use instead.
VLLM_FLAGS = {
    "model": "model",
    "host": "instances.host",
    "port": "instances.base_port",
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "chat_template": "chat_template",
    "tensor_parallel_size": "the topology's @tp, as in E-P-D@tp2",
    "tp": "the topology's @tp, as in E-P-D@tp2",
    "max_model_len": "instances.max_model_len",
    "max_num_seqs": "instances.max_num_seqs",
    "max_num_batched_tokens": "instances.max_num_batched_tokens",
    "kv_cache_memory_bytes": "instances.kv_cache_bytes",
    "gpu_memory_utilization": "instances.memory_share, or instances.share for instances in parentheses",
    "ec_transfer_config": "the topology, which decides where encoder output goes",
    "kv_transfer_config": "vllm.kv",
    "api_key": "gateway.api_keys",
    "uds": "instances.base_port",
    "data_parallel_size": "a count in the topology, as in 2P",
    "pipeline_parallel_size": "the topology's @tp",
}


def _check_engine_args(arguments: dict[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    """Return the flags by name without the dashes, with ``_`` for ``-``."""
    checked = {name.removeprefix("--").replace("-", "_"): value for name, value in arguments.items()}
    for name in checked.keys() & VLLM_FLAGS.keys():
        raise ValueError(f"{name} is not set here; use {VLLM_FLAGS[name]}")
    return checked


EngineArgs = Annotated[dict[str, ArgumentValue], AfterValidator(_check_engine_args)]


BatchingOrder = Literal["fcfs", "sjf", "slack"]
FeatureStoreKind = Literal["embedded", "mooncake"]

#: Time without an answer to ``GET /health`` after which a ready process is killed and restarted. Long steps do
#: not delay answers: the event loop runs in another thread.
HANG_TIMEOUT_S = 30.0
#: Minimum memory that a process must lend to Mooncake Store.
MIN_SEGMENT_BYTES = 16 << 20

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class KVTransferConfig(Section):
    """Transfer of the KV cache from prefill to decode."""

    transport: Literal["auto", "shm", "tcp", "mooncake"] = Field(
        default="auto",
        description="auto: device to device or shared memory on one host, otherwise TCP. mooncake: its Transfer "
        "Engine.",
    )
    group_layers: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="Layers per transfer; auto chooses from measured times."
    )


class SLOConfig(Section):
    """Latency targets of the deployment; instances limit their batches to meet them."""

    ttft_ms: Positive | None = Field(default=None, description="Longest time to first token.")
    tpot_ms: Positive | None = Field(default=None, description="Longest time between two output tokens.")


class BatchingConfig(Section):
    """Order of work in steps."""

    order: BatchingOrder = Field(
        default="fcfs",
        description="Order of waiting prompts. fcfs: by arrival. sjf: shortest first; long ones may starve. "
        "slack: least time left until slo.ttft_ms first, late ones last.",
    )


class MooncakeConfig(Section):
    """Mooncake, used if kv_transfer.transport or feature_store is mooncake."""

    master: str | None = Field(
        default=None,
        pattern=r"^[^\s:/]+:\d{1,5}$",
        description="host:port of a running mooncake_master; null: 'epd-serve up' starts one.",
    )
    devices: str | None = Field(
        default=None,
        min_length=1,
        description="Comma-separated RDMA devices; null: TCP, or an NPU's own links.",
    )


class ShapeConfig(Section):
    """A model known only by its sizes, for emulated devices, which compute nothing."""

    shape_of: Annotated[str, AfterValidator(lambda name: shape_of(name) and name)] = Field(
        min_length=1,
        description="A known model name, such as qwen2.5-vl-7b, or the absolute path of a directory with a "
        "config.json.",
    )


class SharedConfig(Section):
    """Settings common to all processes of a deployment."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Dtype of weights and computation. auto: the checkpoint's, or bfloat16 if the device cannot "
        "compute in that.",
    )
    chat_template: FilePath | None = Field(
        default=None,
        description="Jinja file that replaces the model's chat template, at the same path on every host.",
    )
    feature_store: FeatureStoreKind = Field(
        default="embedded",
        description="embedded: one per encoder. mooncake: one shared by all instances.",
    )
    mooncake: MooncakeConfig = MooncakeConfig()
    slo: SLOConfig = SLOConfig()
    trace: FilePath | None = Field(
        default=None,
        description="Directory for a trace of every process; 'epd-serve trace DIR' joins them for a viewer.",
    )


class InstanceSettings(Section):
    """Settings of all instances, or of one role."""

    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads per instance, within the cores of its share; null: all cores, divided equally "
        "among the machine's busy instances.",
    )
    share: Fraction | None = Field(
        default=None,
        description="Fraction of its device for an instance: cores of a CPU, memory and, by MPS, "
        "multiprocessors of a GPU, memory and AI cores of an NPU. null: no limit, or an equal part of the rest "
        "if another instance on the device has a share.",
    )
    memory_share: Fraction | None = Field(
        default=None,
        description="Fraction of an accelerator's memory; null: same as share. Instances without shares on "
        "one device divide 0.9 of it; a language model gets five times as much as an encoder.",
    )
    tower_share: Fraction | None = Field(
        default=None,
        description="Fraction of a GPU's multiprocessors for the encoder of an instance with a language model, "
        "which may use all of them.",
    )
    resident: Literal["role", "all"] | None = Field(
        default=None,
        description="Weights that stay loaded. role: those of the present role. all: those of all stages, so "
        "that role switches take milliseconds. null: all on a CPU with gateway.admin or elastic, otherwise role.",
    )
    assist: bool = Field(
        default=False,
        description="For EPD next to other instances with P and D: it encodes for them, and serves text "
        "requests while it has nothing to encode and their queue is long.",
    )
    kv_cache_bytes: Bytes | None = Field(
        default=None, description="Size of the KV cache on each device; null: derived from the device's memory."
    )
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Token budget of a step; null: 2048."
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Maximum sequences in a step; null: by a GPU's memory, 256 for 80 GB, 64 on a CPU or an NPU.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt plus answer, in tokens; null: the model's limit.",
    )
    image_budget_pixels: int = Field(
        default=8 << 20,
        ge=1,
        description="Maximum pixels encoded in a step, after resizing.",
    )
    feature_cache_bytes: Bytes | None = Field(
        default=None,
        description="Cache of encoder output at E and at P; null: by a GPU's memory, 256MiB on a CPU or an NPU.",
    )
    peer_timeout_s: Positive = Field(
        default=30.0,
        description="Time that memory is kept for a peer that does not confirm; with engine vllm, also the time "
        "that P waits for a feature before computing it itself.",
    )
    drain_s: Positive = Field(
        default=30.0,
        description="Time to finish running requests after SIGTERM, here and at the gateway.",
    )
    engine_args: EngineArgs = Field(
        default_factory=dict,
        description="Flags of vllm serve for engine: vllm, as in {enforce_eager: true, seed: 1}.",
    )
    kv_transfer: KVTransferConfig = KVTransferConfig()
    batching: BatchingConfig = BatchingConfig()

    def overridden_by(self, override: InstanceSettings) -> InstanceSettings:
        """Return these settings, replaced by those set explicitly in ``override``."""
        own = self.model_dump(include=set(InstanceSettings.model_fields), exclude_unset=True)
        return InstanceSettings.model_validate(overlay(own, override.model_dump(exclude_unset=True)))


class InstancesConfig(InstanceSettings):
    """The instances of the deployment."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address of the control servers.")
    base_port: Port = Field(
        default=0, description="Port of the first instance; the others follow. 0 chooses free ports."
    )


class ElasticConfig(Section):
    """A controller that switches roles of instances when a stage exceeds its SLO.

    'epd-serve up' starts it if the file has this section.
    """

    cooldown_s: Positive = Field(
        default=10.0,
        description="Minimum time between two switches; the controller checks ten times as often.",
    )

    @property
    def interval_s(self) -> float:
        """Seconds between two checks of the instances."""
        return self.cooldown_s / 10


def overlay(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` overridden by ``changes``, section by section."""
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = overlay(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged
