"""The sections of a deployment file that gateway and instances share, and those of instances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from epd_serve.config.sizes import Bytes
from epd_serve.cost.shape import shape_of


class Section(BaseModel):
    """Some keys of the deployment file; one field is one option."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def resolved_path(path: Path, info: ValidationInfo) -> Path:
    """Return a path relative to the deployment file as an absolute one."""
    directory: Path | None = (info.context or {}).get("directory")
    return path if directory is None else directory / path.expanduser()


#: A path relative to the deployment file.
FilePath = Annotated[Path, AfterValidator(resolved_path)]

ArgumentValue = bool | int | float | str

#: Flags of ``vllm serve`` that the topology and other keys decide, with the key to use in their place.
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
    "num_gpu_blocks_override": "instances.num_blocks",
    "kv_cache_memory_bytes": "instances.kv_cache_bytes",
    "gpu_memory_utilization": "instances.memory_share, or instances.share for instances in parentheses",
    "ec_transfer_config": "the topology: it decides which instances hand on encoder output",
    "kv_transfer_config": "vllm.kv",
    "api_key": "gateway.api_key",
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

MEBIBYTE = 1024**2
#: A process that was ready and answers no ``GET /health`` for this long is killed and started again. A step of
#: minutes does not delay an answer: the event loop is another thread.
HANG_TIMEOUT_S = 30.0
#: What a process must lend to Mooncake Store at least.
MIN_SEGMENT_BYTES = 16 * MEBIBYTE

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class KVTransferConfig(Section):
    """The KV cache's move from prefill to decode."""

    transport: Literal["auto", "shm", "tcp", "mooncake"] = Field(
        default="auto",
        description="auto: from device to device or in shared memory on one host, else TCP. mooncake: its "
        "Transfer Engine.",
    )
    group_layers: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="Layers sent together; auto chooses from measured times."
    )


Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SLOConfig(Section):
    """The latencies that the deployment is to keep; instances bound their batches so that they do."""

    ttft_ms: Milliseconds | None = Field(default=None, description="Longest time to first token; null: no limit.")
    tpot_ms: Milliseconds | None = Field(
        default=None, description="Longest time between two tokens of an answer; null: no limit."
    )


class BatchingConfig(Section):
    """The order in which work is put into steps."""

    order: BatchingOrder = Field(
        default="fcfs",
        description="Order of waiting prompts. fcfs: first come, first served. sjf: shortest first; long ones may "
        "starve. slack: least time left until slo.ttft_ms first, late ones last.",
    )


class MooncakeConfig(Section):
    """Mooncake, where kv_transfer.transport or feature_store names it."""

    master: str | None = Field(
        default=None,
        pattern=r"^[^\s:/]+:\d{1,5}$",
        description="host:port of a mooncake_master that runs already; null: 'epd-serve up' starts one.",
    )
    devices: str | None = Field(
        default=None,
        min_length=1,
        description="RDMA devices, with commas between them; null: it uses TCP, and on NPUs their own links.",
    )


def _check_shape(name: str) -> str:
    shape_of(name)
    return name


class ShapeConfig(Section):
    """A model of which only the sizes are there: nothing is computed, on emulated devices."""

    shape_of: Annotated[str, AfterValidator(_check_shape)] = Field(
        min_length=1,
        description="A model that is known by name, as qwen2.5-vl-7b, or an absolute path of a directory with a "
        "config.json. Answers are syllables, by hashes of what came before them.",
    )


class SharedConfig(Section):
    """Settings that all processes of a deployment have in common."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Of weights and computation. auto: the checkpoint's own, or bfloat16 where the device does "
        "not compute in that, or has no products in float16.",
    )
    chat_template: FilePath | None = Field(
        default=None,
        description="Jinja file, relative to this one, in place of the model's own chat template; on each host it "
        "has this path. null: the model's own.",
    )
    feature_store: FeatureStoreKind = Field(
        default="embedded",
        description="embedded: each encoder keeps its own. mooncake: one for all instances.",
    )
    mooncake: MooncakeConfig = MooncakeConfig()
    slo: SLOConfig = SLOConfig()
    trace: FilePath | None = Field(
        default=None,
        description="Directory, relative to this file, in which every process writes what it did when; "
        "'epd-serve trace DIR' joins that for a viewer. null: nothing is written.",
    )


class InstanceSettings(Section):
    """Settings of all instances, or of those of one role."""

    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of each, within the cores of its share; null: all cores, divided equally among "
        "the instances of the machine that compute at the moment.",
    )
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Part of its device that an instance keeps to, in (0, 1]: cores on a CPU, memory and, by MPS, "
        "multiprocessors of a GPU, memory and AI cores of an NPU. null: no limit, or, where another instance "
        "on the device has a share, an equal part of the rest.",
    )
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Part of an accelerator's memory; null: as share, and where several instances are on it "
        "without shares, their part of 0.9: a language model five times as much as an encoder.",
    )
    tower_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Part of its multiprocessors to which the encoder keeps in an instance that holds a language "
        "model as well, which may use all of them: a green context of a GPU; emulated devices have it too. "
        "null: no limit.",
    )
    resident: Literal["role", "all"] | None = Field(
        default=None,
        description="Weights that an instance keeps loaded. role: those of its stages. all: those of all stages, "
        "so that it takes another role in milliseconds. null: all on a CPU where roles may be switched, by "
        "gateway.admin or elastic; else role.",
    )
    assist: bool = Field(
        default=False,
        description="For EPD beside other instances with P and D: it encodes for them, and takes requests of "
        "text while their queue is long and it has nothing to encode.",
    )
    num_blocks: int | None = Field(default=None, ge=1, description="KV blocks; null: chosen from the memory.")
    kv_cache_bytes: Bytes | None = Field(default=None, description="KV cache size, instead of num_blocks.")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="Token budget of a step; null: 2048."
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Most sequences in a step; null: by a GPU's memory, 256 for 80 GB, 64 on a CPU or an NPU.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt and answer together, in tokens; null: what the model allows.",
    )
    image_budget_pixels: int = Field(
        default=8 * MEBIBYTE,
        ge=1,
        description="Most pixels encoded in a step, as resized.",
    )
    feature_cache_bytes: Bytes | None = Field(
        default=None,
        description="Encoder output that E keeps for P to fetch and that P keeps once fetched, on their devices; "
        "null: by a GPU's memory, 256MiB on a CPU or an NPU.",
    )
    feature_timeout_s: Seconds = Field(
        default=30.0,
        description="How long P waits for a feature before computing it itself.",
    )
    lease_s: Seconds = Field(default=30.0, description="How long memory is kept for a peer that does not confirm.")
    drain_s: Seconds = Field(
        default=30.0,
        description="How long requests in progress may go on after SIGTERM, here and at the gateway; "
        "new ones are refused.",
    )
    engine_args: EngineArgs = Field(
        default_factory=dict,
        description="Flags of vllm serve for engine: vllm, as in {enforce_eager: true, seed: 1}.",
    )
    kv_transfer: KVTransferConfig = KVTransferConfig()
    batching: BatchingConfig = BatchingConfig()

    @model_validator(mode="after")
    def _one_size(self) -> InstanceSettings:
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("num_blocks and kv_cache_bytes set the same thing; give one of them")
        return self

    def overridden_by(self, override: InstanceSettings) -> InstanceSettings:
        """These settings with those that ``override`` was given explicitly put in their place."""
        own = self.model_dump(include=set(InstanceSettings.model_fields), exclude_unset=True)
        changes = override.model_dump(exclude_unset=True)
        if "num_blocks" in changes or "kv_cache_bytes" in changes:
            changes = {"num_blocks": None, "kv_cache_bytes": None} | changes
        return InstanceSettings.model_validate(overlay(own, changes))


class InstancesConfig(InstanceSettings):
    """The instances of the deployment."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address of their control servers.")
    base_port: Port = Field(default=0, description="Port of the first; the others follow. 0 chooses free ports.")


def overlay(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``changes`` put over them, section by section."""
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = overlay(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged
