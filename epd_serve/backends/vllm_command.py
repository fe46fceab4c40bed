"""The command line and environment of a vLLM process. Pure: reads no files and imports nothing from vLLM."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from epd_serve.rpc.tls import TlsFiles
from epd_serve.topology import InstancePlacement
from epd_serve.types import Role, Stage

#: Ports of an instance's other servers, as offsets from its HTTP port (config.vllm.PORTS_PER_INSTANCE).
FEATURE_PORT, KV_PORT = 1, 2

#: Read by epd_serve.vllm_plugin.spinning.
SPIN_VARIABLE = "EPD_SERVE_SPIN_S"

#: Timeouts of transfers between NPUs, from vllm-ascend's guide (kv_pool.md): HCCL's is 4 us * 2**n, others in ms.
_NPU_TIMEOUTS = {
    "HCCL_RDMA_TIMEOUT": "17",
    "ASCEND_CONNECT_TIMEOUT": "10000",
    "ASCEND_TRANSFER_TIMEOUT": "10000",
}
#: Seconds for which P keeps KV that no D requests, and D waits for P to compute a prompt.
_MOONCAKE_LEASE_S = 60
_GIB = 1 << 30
_PLUGIN = "epd_serve.vllm_plugin"


#: vLLM's connectors that move KV from P to D.
KVConnector = Literal["mooncake", "nixl"]


@dataclass(frozen=True, kw_only=True)
class Connectors:
    """The connectors that transfer a deployment's features and KV; None if no instance needs one.

    Attributes:
        features: ``store`` (epd-serve's) or ``file`` (vLLM's ECExampleConnector, through ``feature_dir``).
        kv: vLLM's MooncakeConnector (vllm-ascend's MooncakeConnectorV1) or NixlConnector.
        pulls: whether D requests KV after P has answered, with the parameters in P's answer.
        widths: tensor-parallel ranks of P and of D.
        store_bytes, cache_bytes: encoder output kept by E and by P, with ``store``.
        feature_timeout_s: time that P waits for encoder output before it encodes the item itself.
    """

    features: Literal["store", "file"] | None = None
    kv: KVConnector | None = None
    pulls: bool = False
    widths: tuple[int, int] = (1, 1)
    feature_dir: str = ""
    store_bytes: int = 256 << 20
    cache_bytes: int = 256 << 20
    feature_timeout_s: float = 30.0

    @classmethod
    def between(cls, placement: Sequence[InstancePlacement], kv: KVConnector | None = None) -> Connectors:
        """Return the connectors that these instances need; ``kv``: the chosen one, if any.

        vllm-ascend's vLLM (0.23) lacks the hooks of ``store``.
        """
        kinds, moving = kinds_of(placement), kinds_of(moving_kv(placement))
        encodes = any(str(one.role) == "E" for one in placement)
        decodes = any(one.role.decodes and not one.role.prefills for one in placement)
        kv = (kv or ("nixl" if "cuda" in moving else "mooncake")) if decodes else None
        prefill_width, decode_width = (
            max([one.tensor_parallel for one in placement if stage in one.role.stages], default=1)
            for stage in (Stage.PREFILL, Stage.DECODE)
        )
        return cls(
            features=("file" if "npu" in kinds else "store") if encodes else None,
            kv=kv,
            pulls=kv == "nixl" or (kv == "mooncake" and "npu" in moving),
            widths=(prefill_width, decode_width),
        )

    @property
    def holds_both(self) -> bool:
        """True if each process with a language model can both send and receive KV (:meth:`roles_of`)."""
        return self.kv == "mooncake" and not self.pulls and self.features != "file"

    def moves_kv(self, role: Role) -> bool:
        """Return whether an instance sends or receives KV, now or after a role switch."""
        can_change = self.holds_both and role.has_language_model
        return self.kv is not None and (role.prefills != role.decodes or can_change)

    def takes_features(self, role: Role) -> bool:
        """Return whether an instance consumes features, now or after a role switch, if there are encoders."""
        return role.has_language_model and not role.encodes and (role.prefills or self.holds_both)

    def roles_of(self, role: Role) -> frozenset[Role]:
        """Return the roles that an instance's process can serve; it is unaware of a switch between them."""
        if not (self.holds_both and role.has_language_model):
            return frozenset({role})
        names = ("P", "PD", "D") if self.features else ("P", "PD", "D", "EP", "EPD")
        return frozenset(map(Role.parse, names))


def moving_kv(placement: Iterable[InstancePlacement]) -> list[InstancePlacement]:
    """Return the instances that send or receive KV."""
    return [one for one in placement if one.role.prefills != one.role.decodes]


def kinds_of(placement: Iterable[InstancePlacement]) -> set[str]:
    """Return the kinds of the instances' devices."""
    return {device.partition(":")[0] for one in placement for device in one.devices}


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """One vLLM process.

    Attributes:
        python: the interpreter of vLLM's environment.
        number: index of the instance in its deployment, from 0.
        kind: kind of the device: "cpu", "cuda" or "npu".
        visible: value of the variable that limits the visible devices; "" to leave it unset.
        memory_share: fraction of an accelerator's memory for weights and KV.
        kv_bytes: size of the KV cache; None: the remaining memory, and 1 GiB on a CPU.
        cores: CPU cores to bind an instance on a CPU to; "" for no binding.
        tls: certificate files for mutual TLS; None: plain HTTP.
        arguments: additional flags, by name with ``_``.
    """

    name: str
    role: Role
    python: str
    model: str
    served_model_name: str
    host: str
    port: int
    kind: Literal["cpu", "cuda", "npu"]
    number: int = 0
    visible: str = ""
    tensor_parallel: int = 1
    dtype: str = "auto"
    chat_template: Path | None = None
    memory_share: float | None = None
    kv_bytes: int | None = None
    threads: int = 1
    cores: str = ""
    connectors: Connectors = Connectors()
    tls: TlsFiles | None = None
    arguments: Mapping[str, bool | int | float | str] = field(default_factory=dict)


def command_of(options: VllmOptions) -> tuple[str, ...]:
    """Return the ``vllm serve`` command with all flags."""
    flags: dict[str, bool | int | float | str] = {
        "host": options.host,
        "port": options.port,
        "served_model_name": options.served_model_name,
        "dtype": options.dtype,
        "enable_prompt_tokens_details": True,  # reports P's prefix cache hits
    }
    if options.chat_template is not None:
        flags["chat_template"] = str(options.chat_template)
    if options.tls is not None:
        flags |= options.tls.server_options
    if options.tensor_parallel > 1:
        flags["tensor_parallel_size"] = options.tensor_parallel
    if options.memory_share is not None and options.kind != "cpu":
        flags["gpu_memory_utilization"] = options.memory_share
    if options.kv_bytes is not None and options.kind != "cpu":
        flags["kv_cache_memory_bytes"] = options.kv_bytes
    if (features := feature_config(options)) is not None:
        flags["ec_transfer_config"] = _json(features)
        if features["ec_role"] == "ec_producer":
            flags["enable_prefix_caching"] = False  # an encoder lacks a KV cache
    if (kv := kv_config(options)) is not None:
        flags["kv_transfer_config"] = _json(kv)
    flags |= options.arguments
    command = [options.python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    for name, value in flags.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            command += [f"--{dashed}", str(value)]
    return tuple(command)


def environment_of(options: VllmOptions) -> dict[str, str]:
    """Return the variables that the process needs in addition to its parent's."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if options.kind == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil((options.kv_bytes or _GIB) / _GIB)))
        variables["VLLM_CPU_OMP_THREADS_BIND"] = options.cores or "nobind"
        variables["OMP_NUM_THREADS"] = str(options.threads)
        variables[SPIN_VARIABLE] = "0.0005"  # vLLM's default of a second keeps cores from other processes
    elif options.visible:
        names = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
        variables[names[options.kind]] = options.visible
    connectors = options.connectors
    kv = connectors.kv if connectors.moves_kv(options.role) else None
    if (options.kind == "npu" or kv == "mooncake") and options.host not in ("0.0.0.0", "::"):
        variables["VLLM_HOST_IP"] = options.host  # the default is the address of the default route
    if kv == "mooncake" and options.kind == "npu":
        variables |= _NPU_TIMEOUTS
    elif kv == "mooncake":
        variables["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(options.port + KV_PORT)
        variables["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = str(_MOONCAKE_LEASE_S)
    elif kv == "nixl":
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = options.host
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.port + KV_PORT)
        variables["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"  # required for linear attention; only on CPUs vLLM's choice
    return variables


def feature_config(options: VllmOptions) -> dict[str, Any] | None:
    """Return ``--ec-transfer-config``: E produces, P and PD consume; EP and EPD do not share features.

    A D that may become P consumes, too.
    """
    role, connectors = options.role, options.connectors
    takes = connectors.takes_features(role)
    if connectors.features is None or not (takes or str(role) == "E"):
        return None
    config: dict[str, Any] = {"ec_role": "ec_consumer" if takes else "ec_producer"}
    if connectors.features == "file":
        extra: dict[str, Any] = {"shared_storage_path": connectors.feature_dir}
        return {"ec_connector": "ECExampleConnector", **config, "ec_connector_extra_config": extra}
    extra = {"bytes": connectors.cache_bytes if takes else connectors.store_bytes}
    if takes:
        extra["timeout_s"] = connectors.feature_timeout_s
    return {
        "ec_connector": "StoreFeatureConnector",
        "ec_connector_module_path": f"{_PLUGIN}.features",
        **config,
        "ec_ip": options.host,
        "ec_port": options.port + FEATURE_PORT,
        "ec_buffer_device": "cpu",
        "ec_connector_extra_config": extra,
    }


def kv_config(options: VllmOptions) -> dict[str, Any] | None:
    """Return ``--kv-transfer-config`` of a role that moves KV. D recomputes a prompt if its KV fails to arrive."""
    role, connectors = options.role, options.connectors
    if not connectors.moves_kv(role):
        return None
    kv_role = "kv_both" if connectors.holds_both else "kv_producer" if role.prefills else "kv_consumer"
    # vllm-ascend derives ports from the id. Elsewhere vLLM draws one per start: D caches P's address by it.
    engine_id = {"engine_id": str(options.number)} if options.kind == "npu" else {}
    config = {"kv_role": kv_role, **engine_id, "kv_load_failure_policy": "recompute"}
    buffer = {"kv_buffer_device": "cpu"} if options.kind == "cpu" else {}
    connector = {"kv_connector": "NixlConnector"} if connectors.kv == "nixl" else _mooncake(options)
    return {**connector, **config, **buffer}


def _mooncake(options: VllmOptions) -> dict[str, Any]:
    if options.kind == "npu":  # registered by vllm-ascend
        sizes = zip(("prefill", "decode"), options.connectors.widths, strict=True)
        return {
            "kv_connector": "MooncakeConnectorV1",
            "kv_port": str(options.port + KV_PORT),
            "kv_connector_extra_config": {stage: {"dp_size": 1, "tp_size": width} for stage, width in sizes},
        }
    if options.kind == "cpu":  # vLLM's connector needs an accelerator
        return {
            "kv_connector": "MooncakeCPUConnector",
            "kv_connector_module_path": f"{_PLUGIN}.mooncake_cpu",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
    return {"kv_connector": "MooncakeConnector"}


def shell_line(command: tuple[str, ...], variables: Mapping[str, str]) -> str:
    """Return a shell line that runs the command with these variables."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)])


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
