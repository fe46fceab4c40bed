"""The whole deployment file, and the placement, model and instance options that follow from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from device.datasheets import emulated_kind, is_measured, spec_of
from epd_serve.config.gateway import GatewayConfig, Secret, read_secret
from epd_serve.config.model_files import DEMO_MODEL, HubModel, model_path, resolve_model_name
from epd_serve.config.options import InstanceOptions
from epd_serve.config.sections import (
    ElasticConfig,
    FilePath,
    InstancesConfig,
    InstanceSettings,
    RoleName,
    Section,
    ShapeConfig,
    SharedConfig,
    resolved_path,
)
from epd_serve.config.shares import DeviceShare, device_shares, memory_shares
from epd_serve.config.vllm import VllmConfig
from epd_serve.cost.roofline import emulated_profile
from epd_serve.cost.shape import shape_of
from epd_serve.protocol.addresses import is_wildcard
from epd_serve.rpc.cluster import check_cluster_key, cluster_key
from epd_serve.rpc.tls import TlsFiles, tls_files
from epd_serve.topology import InstancePlacement, Topology, parse_topology, place
from epd_serve.types import Role


def _read_topology(value: object) -> Topology:
    if isinstance(value, Topology):
        return value
    if not isinstance(value, str):
        raise ValueError("a topology is a line of text such as E-P-D")
    return parse_topology(value)


def _read_device(name: str, info: ValidationInfo) -> str:
    """Check a device's name, making the path of a profile absolute. Raises ValueError."""
    if name == "cpu" or re.fullmatch(r"(cuda|npu):\d+", name):
        return name
    if match := re.fullmatch(r"emulated:(.+):(\d+)", name):
        kind, index = match.groups()
        if is_measured(kind):
            return f"emulated:{resolved_path(Path(kind), info)}:{index}"
        spec_of(kind)
        return name
    raise ValueError(f"{name!r} is not a device; write cpu, cuda:0, npu:0 or emulated:h200:0")


def _resolve_model(model: object, info: ValidationInfo) -> object:
    """Resolve a model's directory relative to the deployment file."""
    directory: Path | None = (info.context or {}).get("directory")
    if directory is None or not isinstance(model, str) or model == DEMO_MODEL:
        return model
    return resolve_model_name(model, directory)


def _read_devices(value: object) -> object:
    """Expand ``cuda x 8`` to cuda:0 ... cuda:7."""
    if not isinstance(value, list | tuple):
        return value
    names: list[object] = []
    for one in value:
        many = re.fullmatch(r"(\S+) x (\d{1,4})", one) if isinstance(one, str) else None
        many = None if many and many[1] == "cpu" else many
        names += [f"{many[1]}:{index}" for index in range(int(many[2]))] if many else [one]
    return tuple(names)


class TlsConfig(Section):
    """Mutual TLS with certificates of one CA, between gateways and instances and to the admin plane's port.

    Processes started elsewhere read EPD_SERVE_TLS_CA, EPD_SERVE_TLS_CERT and EPD_SERVE_TLS_KEY.
    """

    ca: FilePath = Field(description="PEM file of the CA.")
    cert: FilePath = Field(
        description="PEM file with the server and client certificate of this machine's processes, for the "
        "address that peers use. The path is the same on every host."
    )
    key: FilePath = Field(description="PEM file with its private key, without a password.")


class DeploymentConfig(SharedConfig):
    """One deployment: a topology of instances on devices, behind one gateway.

    The defaults are a complete deployment: E-P-D with the built-in demo model on the CPU.
    """

    topology: Annotated[
        Topology,
        PlainValidator(_read_topology),
        PlainSerializer(str, return_type=str),
        WithJsonSchema({"type": "string", "examples": ["EPD", "E-P-D", "(E-P)-D", "4E-8P-20D"]}),
    ] = Field(
        default=parse_topology("E-P-D"),
        description="Adjacent letters are the stages of one instance, '-' separates devices, "
        "() puts separate instances on one device.",
        json_schema_extra={"default": "E-P-D"},
    )
    model: Annotated[Annotated[str, Field(min_length=1)] | ShapeConfig, AfterValidator(_resolve_model)] = Field(
        default=DEMO_MODEL,
        description="'demo' for the built-in model, the directory of a transformers model, or a name on the "
        "Hugging Face hub, such as Qwen/Qwen2.5-VL-3B-Instruct, optionally with @REVISION. "
        "{shape_of: qwen2.5-vl-7b} is a model without weights for emulated devices.",
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="The model's name for clients; null: 'demo', the directory's name, or the hub's.",
    )
    engine: Literal["auto", "native", "vllm"] = Field(
        default="auto",
        description="native: epd-serve's own engine. vllm: vLLM, and vllm-ascend on NPUs. auto: vLLM if all "
        "devices are GPUs or NPUs and an installed vLLM knows the model; otherwise native.",
    )
    vllm: VllmConfig = VllmConfig()
    devices: Annotated[
        tuple[Annotated[str, AfterValidator(_read_device)], ...],
        BeforeValidator(_read_devices),
        WithJsonSchema(
            {"anyOf": [{"const": "auto", "type": "string"}, {"items": {"type": "string"}, "type": "array"}]}
        ),
    ] = Field(
        default=("cpu",),
        validate_default=True,
        json_schema_extra={"default": "auto"},
        description="auto: this machine's GPUs or NPUs, otherwise the CPU; the CPU for the built-in model and on "
        "clusters. Or a list in the order of the topology: cpu, cuda:0, npu:1; [cpu] serves all instances. "
        "'cuda x 8' is cuda:0 to cuda:7. emulated:h200:0 takes an accelerator's time and memory but computes "
        "nothing; emulated:FILE.json:0 takes those measured by 'epd-serve profile'.",
    )
    restart: Literal["on-failure", "never"] = Field(
        default="on-failure",
        description="on-failure: restart an instance or gateway that was ready and ended, while the others "
        "serve. never: its end stops the deployment.",
    )
    gateway: GatewayConfig = GatewayConfig()
    elastic: ElasticConfig | None = None
    instances: InstancesConfig = InstancesConfig()
    cluster_key: Secret | None = Field(
        default=None,
        repr=False,
        description="Key that instances and gateways prove to each other: text, {env: VARIABLE} or {file: PATH}. "
        "Processes started elsewhere read EPD_SERVE_CLUSTER_KEY. null: instances answer any caller, and joining "
        "requires the admin plane's key.",
    )
    tls: TlsConfig | None = None
    roles: dict[RoleName, InstanceSettings] = Field(
        default_factory=dict,
        description="Overrides of 'instances' by role, also for roles missing from the topology.",
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        devices = _read_devices(values.get("devices"))
        if devices == "auto":
            return {key: value for key, value in values.items() if key != "devices"}
        if isinstance(devices, tuple) and "cpu" not in devices and len(devices) in (1, 2):
            return {"topology": "EPD" if len(devices) == 1 else "EP-D", **values}
        return values

    @field_validator("topology")
    @classmethod
    def _towers_are_whole(cls, topology: Topology) -> Topology:
        for member in topology.members:
            if member.tensor_parallel > 1 and not member.role.has_language_model:
                raise ValueError(
                    f"'@tp{member.tensor_parallel}' splits a language model and {member.role} has none; "
                    f"for more encoders write a count, as in {member.tensor_parallel}{member.role}"
                )
        return topology

    @field_validator("devices")
    @classmethod
    def _enough_devices(cls, devices: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if "topology" in info.data:
            place(info.data["topology"], devices)
        return devices

    @model_validator(mode="after")
    def _engine_fits(self) -> DeploymentConfig:
        placement, settings = self.placement(), self._settings_of_placement()
        emulated = [one for one in placement if one.devices[0].startswith("emulated:")]
        if self.engine == "vllm":
            if emulated:
                raise ValueError("devices: vLLM cannot run on emulated devices; write engine: native")
            if "feature_store" in self.model_fields_set:
                raise ValueError("feature_store has no effect with engine: vllm; leave it out")
            if self.cluster_key is not None and self.tls is None:
                raise ValueError("cluster_key: vLLM's own server asks for none; set tls, too")
            if self.elastic is not None:
                raise ValueError("elastic is for engine: native; switch roles of vLLM's instances by hand")
            self.vllm.check(placement, settings)
        elif "vllm" in self.model_fields_set or any(one.engine_args for one in settings.values()):
            raise ValueError("vllm and engine_args are for engine: vllm; write that, or remove them")
        wide = next((one for one in placement if one.tensor_parallel > 1), None)
        if wide is not None and (self.engine == "native" or emulated):
            raise ValueError(
                f"topology: @tp{wide.tensor_parallel} needs engine: vllm; the native engine runs each instance on "
                "one device"
            )
        return self

    @model_validator(mode="after")
    def _model_fits(self) -> DeploymentConfig:
        is_emulated = {device.startswith("emulated:") for device in (one.devices[0] for one in self.placement())}
        if isinstance(self.model, str):
            if True in is_emulated:
                raise ValueError(
                    "devices: emulated devices compute nothing; write model: {shape_of: NAME}, as in qwen2.5-vl-7b"
                )
            return self
        if False in is_emulated:
            raise ValueError(
                "model: shape_of lacks weights, so real devices have nothing to compute; write devices such as "
                "[emulated:ascend-910b3 x 8], or the model's directory"
            )
        if "dtype" in self.model_fields_set and self.dtype == "float32":
            raise ValueError("dtype: shape_of has the sizes of half precision; write bfloat16, or leave it out")
        takes_text_only = shape_of(self.model.shape_of).vision is None
        if takes_text_only and any(str(member.role) == "E" for member in self.topology.members):
            raise ValueError(
                f"topology: {self.topology} has a separate E, but {self.model.shape_of} takes text only"
            )
        return self

    @model_validator(mode="after")
    def _settings_fit(self) -> DeploymentConfig:
        self.device_shares()
        if self.cluster_key is not None:
            self.gateway.admin.check_key()
        if self.elastic is not None and (self.slo.ttft_ms is None or self.slo.tpot_ms is None):
            raise ValueError("elastic needs limits: set slo.ttft_ms and slo.tpot_ms")
        orders = {one.batching.order for one in (self.instances, *map(self.settings_for, self.roles))}
        if "slack" in orders and self.slo.ttft_ms is None:
            raise ValueError("batching.order: slack needs a deadline; set slo.ttft_ms")
        settings = self._settings_of_placement()
        assisting = {role for role, one in settings.items() if one.assist}
        others = "".join(settings.keys() - assisting)
        if assisting and (assisting != {"EPD"} or not {"P", "D"} <= {*others}):
            raise ValueError(
                "assist is for EPD next to other instances with P and D, as in topology: 2EPD-2PD and "
                "roles: {EPD: {assist: true}}"
            )
        movers = {role: one.kv_transfer.transport for role, one in settings.items() if role != "E"}
        over = sorted(role for role, transport in movers.items() if transport == "mooncake")
        if over and len(over) < len(movers):
            raise ValueError(
                f"kv_transfer.transport is mooncake for {', '.join(over)} alone; KV moves between instances that "
                f"have the same: {', '.join(sorted(movers))}"
            )
        return self

    def device_shares(self, placement: Sequence[InstancePlacement] | None = None) -> dict[str, DeviceShare]:
        """Return the shares of instances by name; omit instances without a limit.

        ``placement``: None: this deployment's. Raises ValueError for shares that do not fit on a device.
        """
        placement = self.placement() if placement is None else placement
        return device_shares(placement, {str(one.role): self._of(one).share for one in placement})

    def memory_shares(self, placement: Sequence[InstancePlacement]) -> dict[str, float]:
        """Return the fraction of its accelerator's memory for each instance without a share, by name.

        Raises ValueError for parts that do not fit on a device.
        """
        shared = self.device_shares(placement)
        wishes = {str(one.role): self._of(one).memory_share for one in placement}
        return memory_shares([one for one in placement if one.name not in shared], wishes)

    @property
    def uses_mooncake(self) -> bool:
        """True if the deployment needs the mooncake package."""
        transports = {one.kv_transfer.transport for one in self._settings_of_placement().values()}
        return self.feature_store == "mooncake" or "mooncake" in transports

    def resident(self, instance: InstancePlacement) -> Literal["role", "all"]:
        """Return the weights that an instance keeps loaded: its role's, or all stages'."""
        if (chosen := self._of(instance).resident) is not None:
            return chosen
        may_switch = self.gateway.admin.port is not None or self.elastic is not None
        return "all" if may_switch and instance.devices[0] == "cpu" else "role"

    @property
    def starts_master(self) -> bool:
        """True if the deployment starts a mooncake_master."""
        return self.feature_store == "mooncake" and self.mooncake.master is None

    @property
    def checkpoint(self) -> str:
        """The name of a model with weights. Raises ValueError for a shape."""
        if isinstance(self.model, ShapeConfig):
            raise ValueError(f"model: shape_of {self.model.shape_of} lacks weights")
        return self.model

    def placement(self) -> tuple[InstancePlacement, ...]:
        return place(self.topology, self.devices)

    def read_cluster_key(self) -> str | None:
        """Return the key from the file or the environment. Raises ValueError if it is missing or invalid."""
        key = read_secret(self.cluster_key, "cluster_key")
        if key is None:
            return None if self.engine == "vllm" else cluster_key()
        return check_cluster_key(key, "cluster_key")

    def read_tls(self) -> TlsFiles | None:
        """Return the files of ``tls`` or of the environment. Raises ValueError if the latter is incomplete."""
        if self.tls is None:
            return tls_files()
        return TlsFiles(ca=self.tls.ca, cert=self.tls.cert, key=self.tls.key)

    def settings_for(self, role: str) -> InstanceSettings:
        """Return the settings of a role: ``instances``, overridden by ``roles``."""
        override = next((settings for name, settings in self.roles.items() if name == role), None)
        return self.instances.overridden_by(override) if override else self.instances

    def settings_by_role(self) -> dict[str, InstanceSettings]:
        """Return the settings of every possible role."""
        return {role: self.settings_for(role) for role in get_args(RoleName)}

    def _of(self, instance: InstancePlacement) -> InstanceSettings:
        return self.settings_for(str(instance.role))

    def _settings_of_placement(self) -> dict[str, InstanceSettings]:
        """Return the settings of the topology's roles."""
        return {str(one.role): self._of(one) for one in self.placement()}

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        if self.served_model_name or self.model == DEMO_MODEL:
            return self.served_model_name or DEMO_MODEL
        if isinstance(self.model, ShapeConfig):
            return shape_of(self.model.shape_of).name
        path, named = Path(self.model), HubModel.parse(self.model)
        return path.resolve().name if named is None or path.is_dir() else named.repo

    def options_for(
        self,
        instance: InstancePlacement,
        *,
        threads: int | None,
        master: str | None = None,
        memory_share: float | None = None,
        **own: Any,
    ) -> InstanceOptions:
        """Return the options of one placed instance.

        Args:
            master: address of the mooncake_master, if the deployment starts one.
            memory_share: its fraction from :meth:`memory_shares`.
            own: its own fields of :class:`InstanceOptions`, such as ``port``, and ``device``, its device's name
                within its process.

        Raises ValueError if the model's directory is invalid.
        """
        if isinstance(self.model, ShapeConfig):
            kind, shape = emulated_kind(instance.devices[0]), self.model.shape_of
            has_encode = emulated_profile(shape, kind).encode
            if instance.role.encodes and shape_of(shape).vision is not None and not has_encode:
                raise ValueError(f"{kind} lacks a vision tower, but {instance.name} encodes")
        settings = self._of(instance)
        values = {name: getattr(self, name) for name in SharedConfig.model_fields}
        values |= {name: getattr(settings, name) for name in InstanceSettings.model_fields}
        if master is not None and self.mooncake.master is None:
            values["mooncake"] = self.mooncake.model_copy(update={"master": master})
        if memory_share is not None:
            values["memory_share"] = memory_share
        values |= {
            "name": instance.name,
            "role": instance.role,
            "model": self.model if isinstance(self.model, ShapeConfig) else model_path(self.model),
            "served_model_name": self.model_name,
            "host": self.instances.host,
            "threads": threads,
            "resident": self.resident(instance),
            "queue_timeout_s": self.gateway.queue_timeout_s,
        }
        return InstanceOptions(**values | own)

    def options_alone(
        self, name: str, role: Role, *, device: str, host: str | None, threads: int | None, **own: Any
    ) -> InstanceOptions:
        """Return the options of an instance started by hand, whose share begins at the start of the device.

        Args:
            host, threads: None: this file's values for its role.
            own: as for :meth:`options_for`.

        Raises ValueError if the instance cannot be started.
        """
        settings, host = self.settings_for(str(role)), host or self.instances.host
        if self.feature_store == "mooncake" and self.mooncake.master is None:
            raise ValueError("feature_store: mooncake needs the address of its master; set mooncake.master")
        if own.get("advertise") is None and is_wildcard(host):
            raise ValueError(
                f"{host} listens on every address, but peers need one that they can reach: "
                "add --advertise ADDRESS, as in --advertise 10.0.0.7"
            )
        return self.options_for(
            InstancePlacement(name=name, role=role, devices=(device,)),
            threads=threads or settings.threads,
            device=device,
            device_share=None if settings.share is None else DeviceShare(share=settings.share, start=0.0),
            host=host,
            **own,
        )


def deployment_schema() -> dict[str, Any]:
    """Return the JSON schema of deployment files, for editors: ``deploy/schema.json``."""
    schema = DeploymentConfig.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
