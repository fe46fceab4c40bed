"""``epd-serve render kubernetes``: render a deployment file as manifests, with a workload per device group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import LiteralScalarString

from epd_serve import __version__
from epd_serve.config import DEMO_MODEL, DeploymentConfig, load_config
from epd_serve.config.keys import ADMIN_KEY
from epd_serve.config.model_files import HubModel
from epd_serve.launch.processes.ports import ports_each
from epd_serve.launch.remote.unit import BASE_PORT, check_portable
from epd_serve.launch.vllm.process import FEATURE_DIR, connectors_of
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import place_units

Manifest = dict[str, Any]

_MANIFESTS = Path(__file__).parent / "manifests"
_MODELS, _FEATURES = "/models", "/features"
#: The ports of manifests/*.yaml.
_HTTP, _ADMIN, _STORE = 8000, 8001, 50051
#: Margin before a container is killed; the gateway is first removed from its service.
_GRACE_S, _GATEWAY_GRACE_S = 15, 20
_LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_USER = {
    "runAsNonRoot": True,
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 10001),
    "seccompProfile": {"type": "RuntimeDefault"},
}


class Resources(BaseModel):
    """A container's resource requests, without its accelerators, which follow from the topology."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: str = "1"
    memory: str = "2Gi"


class Values(BaseModel):
    """The file of ``--values``: a cluster's facts that a deployment file lacks.

    Attributes:
        name: prefix of all names, also of the default secret and claims.
        namespace: None: that of ``kubectl apply``.
        gateway_image: None: ``image``.
        gateways: replicas of the gateway.
        secret: contains admin, cluster and hf-token, as needed.
        model_claim: volume with the models' directories.
        cache_claim: volume for the hub's cache; None: each pod downloads the model.
        feature_claim: ReadWriteMany volume for features of NPUs.
        shm: size of /dev/shm in an instance's pod.
        resources: resources by device group: e, p, e-p, gateway ...
        accelerators: names of device plugins.
        spare_devices: whether a rollout finds free devices; the old pod then stays until the new one is ready.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="epd", pattern=r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$")
    namespace: str | None = None
    image: str = f"epd-serve:{__version__}"
    gateway_image: str | None = None
    gateways: int = Field(default=1, ge=1)
    secret: str | None = None
    model_claim: str | None = None
    cache_claim: str | None = None
    feature_claim: str | None = None
    shm: str = "4Gi"
    resources: dict[str, Resources] = {}
    accelerators: dict[str, str] = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
    spare_devices: bool = False

    @property
    def secret_name(self) -> str:
        return self.secret or f"{self.name}-keys"


def load_values(path: Path) -> Values:
    """Raises ValueError with file, key and fault."""
    try:
        return Values.model_validate(YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def render(file: Path, values: Values) -> str:
    """Return the manifests as YAML. Raises ValueError for a deployment that cannot run on Kubernetes."""
    yaml, text = YAML(), StringIO()
    yaml.width = 4096
    yaml.dump_all(manifests(file, values), text)
    return f"# epd-serve render kubernetes {file.name}\n{text.getvalue()}"


def manifests(file: Path, values: Values) -> list[Manifest]:
    """Return the manifests in the order of their application. Raises ValueError as :func:`render`."""
    config = load_config(file)
    check_portable(config)
    own = YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8")) or {}
    docs = _gateway(config, own, values)
    if config.starts_master:
        docs += _filled("master", "master", values)
    seen: list[str] = []
    for unit, replicas in enumerate(place_units(config.topology, config.devices)):
        part = "-".join(str(one.role).lower() for one in replicas[0])
        seen.append(part)
        part += f"-{seen.count(part)}" if seen.count(part) > 1 else ""
        docs += _instances(config, values, unit, part, replicas)
    for doc in docs:
        if values.namespace is not None:
            doc["metadata"]["namespace"] = values.namespace
    return docs


def _gateway(config: DeploymentConfig, own: Manifest, values: Values) -> list[Manifest]:
    """Return the gateway's manifests; the first contains the user's file, ``own``, adapted to the cluster."""
    instances = {**(own.get("instances") or {}), "base_port": BASE_PORT}
    instances.pop("host", None)
    gateway = {**(own.get("gateway") or {}), "host": "0.0.0.0", "port": _HTTP, "instances": {}}
    gateway["admin"] = {"host": "0.0.0.0", "port": _ADMIN, "key": {"env": ADMIN_KEY}}
    deployment = {**own, "gateway": gateway, "instances": instances}
    if _model_in_directory(config):
        deployment["model"] = f"{_MODELS}/{Path(config.checkpoint).name}"
    if config.starts_master:
        deployment["mooncake"] = {**(own.get("mooncake") or {}), "master": f"{values.name}-master:{_STORE}"}
    if config.engine == "vllm":
        deployment["vllm"] = {key: value for key, value in (own.get("vllm") or {}).items() if key != "python"}
    else:
        deployment["cluster_key"] = {"env": CLUSTER_KEY}
    grace_s = round(config.instances.drain_s + _GATEWAY_GRACE_S)
    image, everyone = values.gateway_image or values.image, _labels(values)
    docs = _filled("gateway", "gateway", values, values.gateways, everyone=everyone, grace=grace_s, image=image)
    text = StringIO()
    YAML().dump(deployment, text)
    docs[0]["data"]["deployment.yaml"] = LiteralScalarString(text.getvalue())
    if config.engine != "vllm":
        docs[1]["spec"]["template"]["spec"]["containers"][0]["env"].append(_key(values, CLUSTER_KEY, "cluster"))
    return docs


def _instances(
    config: DeploymentConfig, values: Values, unit: int, part: str, replicas: Sequence[Sequence[InstancePlacement]]
) -> list[Manifest]:
    """Return the manifests of a unit, whose replicas are a pod each."""
    members, is_vllm = replicas[0], config.engine == "vllm"
    kind = members[0].devices[0].partition(":")[0]
    plugin = values.accelerators.get(kind)
    surges = not plugin or values.spare_devices
    claimed = {"persistentVolumeClaim": {"claimName": values.cache_claim}}
    docs = _filled(
        "instances",
        part,
        values,
        len(replicas),
        unit=unit,
        surge=int(surges),
        unavailable=int(not surges),
        grace=round(max(config.settings_for(str(one.role)).drain_s for one in members) + _GRACE_S),
        shm=values.shm,
        cache={"name": "cache", **(claimed if values.cache_claim else {"emptyDir": {}})},
    )
    pod = docs[0]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    if plugin:
        container["resources"]["limits"][plugin] = str(max(len(one.devices) for one in members))
    step = ports_each(config)
    container["ports"] += [{"name": one.name, "containerPort": BASE_PORT + step * one.index} for one in members]
    container["env"].append(_key(values, *((ADMIN_KEY, "admin") if is_vllm else (CLUSTER_KEY, "cluster"))))
    if kind == "npu":
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        container["env"].append({"name": "HCCL_IF_IP", "valueFrom": address})

    def mount(name: str, path: str, claim: str | None, **more: bool) -> None:
        claim = claim or f"{values.name}-{name}"
        pod["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": claim, **more}})
        container["volumeMounts"].append({"name": name, "mountPath": path, **more})

    if _model_in_directory(config):
        mount("models", _MODELS, values.model_claim, readOnly=True)
    if is_vllm and connectors_of(config).features == "file":
        container["env"].append({"name": FEATURE_DIR, "value": _FEATURES})
        mount("features", _FEATURES, values.feature_claim)
    return docs


def _model_in_directory(config: DeploymentConfig) -> bool:
    model = config.model
    is_path = isinstance(model, str) and (Path(model).is_absolute() or HubModel.parse(model) is None)
    return is_path and model != DEMO_MODEL


def _filled(file: str, part: str, values: Values, count: int = 1, **more: object) -> list[Manifest]:
    """Return a file of ``manifests/``, filled in for ``count`` replicas."""
    wanted = values.resources.get(part, Resources())
    given = {"labels": _labels(values, component=part), "user": _USER, "locked": _LOCKED, "part": part}
    given |= {"name": values.name, "image": values.image, "secret": values.secret_name, "count": count, **more}
    words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    words |= {"cpu": json.dumps(wanted.cpu), "memory": json.dumps(wanted.memory)}  # JSON is YAML
    text = Template((_MANIFESTS / f"{file}.yaml").read_text(encoding="utf-8")).substitute(words)
    docs = YAML(typ="safe", pure=True).load_all(text)
    return [doc for doc in docs if count > 1 or doc["kind"] != "PodDisruptionBudget"]


def _labels(values: Values, **more: str) -> dict[str, str]:
    words = {"name": "epd-serve", "instance": values.name, **more}
    return {f"app.kubernetes.io/{key}": value for key, value in words.items()}


def _key(values: Values, variable: str, key: str) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": values.secret_name, "key": key}}}
