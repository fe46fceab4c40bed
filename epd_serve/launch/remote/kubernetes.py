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
    return _Cluster(config, own, values).manifests()


class _Cluster:
    """The manifests of one deployment: those of ``manifests/``, filled in. ``own`` is the user's file."""

    def __init__(self, config: DeploymentConfig, own: Manifest, values: Values) -> None:
        self._config, self._values = config, values
        self._secret = values.secret or f"{values.name}-keys"
        self._is_vllm = config.engine == "vllm"
        model = config.model
        is_path = isinstance(model, str) and (Path(model).is_absolute() or HubModel.parse(model) is None)
        self._in_directory = is_path and model != DEMO_MODEL
        self._file = self._file_in_cluster(own)

    def manifests(self) -> list[Manifest]:
        docs = self._gateway()
        if self._config.starts_master:
            docs += self._filled("master", "master")
        seen: list[str] = []
        for unit, replicas in enumerate(place_units(self._config.topology, self._config.devices)):
            part = "-".join(str(one.role).lower() for one in replicas[0])
            seen.append(part)
            part += f"-{seen.count(part)}" if seen.count(part) > 1 else ""
            docs += self._instances(unit, part, replicas[0], len(replicas))
        for doc in docs:
            if self._values.namespace is not None:
                doc["metadata"]["namespace"] = self._values.namespace
        return docs

    def _file_in_cluster(self, own: Manifest) -> Manifest:
        """Return the user's file with the addresses, paths and secrets of the cluster."""
        config = self._config
        gateway: Manifest = {**(own.get("gateway") or {})}
        gateway |= {"host": "0.0.0.0", "port": _HTTP, "instances": {}}
        gateway["admin"] = {"host": "0.0.0.0", "port": _ADMIN, "key": {"env": ADMIN_KEY}}
        instances = {**(own.get("instances") or {}), "base_port": BASE_PORT}
        instances.pop("host", None)
        made = {**own, "gateway": gateway, "instances": instances}
        if self._in_directory:
            made["model"] = f"{_MODELS}/{Path(config.checkpoint).name}"
        if config.starts_master:
            made["mooncake"] = {**(own.get("mooncake") or {}), "master": f"{self._values.name}-master:{_STORE}"}
        if self._is_vllm:
            made["vllm"] = {key: value for key, value in (own.get("vllm") or {}).items() if key != "python"}
        else:
            made["cluster_key"] = {"env": CLUSTER_KEY}
        return made

    def _gateway(self) -> list[Manifest]:
        count, grace_s = self._values.gateways, self._config.instances.drain_s + _GATEWAY_GRACE_S
        everyone = {key: value for key, value in self._labels("").items() if not key.endswith("component")}
        image = self._values.gateway_image or self._values.image
        more = {"everyone": everyone, "gateways": count, "grace": round(grace_s), "image": image}
        docs = self._filled("gateway", "gateway", **more)
        text = StringIO()
        YAML().dump(self._file, text)
        docs[0]["data"]["deployment.yaml"] = LiteralScalarString(text.getvalue())
        [container] = _pod(docs[1])["containers"]
        container["env"] += [] if self._is_vllm else [self._key(CLUSTER_KEY, "cluster")]
        return [*docs, *self._budget("gateway", count)]

    def _instances(self, unit: int, part: str, members: Sequence[InstancePlacement], count: int) -> list[Manifest]:
        kind = members[0].devices[0].partition(":")[0]
        plugin = self._values.accelerators.get(kind)
        surges = not plugin or self._values.spare_devices
        drain_s = max(self._config.settings_for(str(one.role)).drain_s for one in members)
        [doc] = self._filled(
            "instances",
            part,
            unit=unit,
            count=count,
            surge=int(surges),
            unavailable=int(not surges),
            grace=round(drain_s + _GRACE_S),
            shm=self._values.shm,
        )
        pod = _pod(doc)
        [container] = pod["containers"]
        if plugin:
            container["resources"]["limits"][plugin] = str(max(len(one.devices) for one in members))
        step = ports_each(self._config)
        container["ports"] += [
            {"name": one.name, "containerPort": BASE_PORT + step * one.index} for one in members
        ]
        container["env"].append(self._key(*((ADMIN_KEY, "admin") if self._is_vllm else (CLUSTER_KEY, "cluster"))))
        if kind == "npu":
            address = {"fieldRef": {"fieldPath": "status.podIP"}}
            container["env"].append({"name": "HCCL_IF_IP", "valueFrom": address})
        if self._values.cache_claim is not None:
            cache = next(volume for volume in pod["volumes"] if volume["name"] == "cache")
            cache["persistentVolumeClaim"] = {"claimName": self._values.cache_claim}
            del cache["emptyDir"]
        if self._in_directory:
            claim = self._values.model_claim or f"{self._values.name}-models"
            _mount(pod, "models", _MODELS, claim, readOnly=True)
        if self._is_vllm and connectors_of(self._config).features == "file":
            container["env"].append({"name": FEATURE_DIR, "value": _FEATURES})
            _mount(pod, "features", _FEATURES, self._values.feature_claim or f"{self._values.name}-features")
        return [doc, *self._budget(part, count)]

    def _budget(self, part: str, count: int) -> list[Manifest]:
        """Return a disruption budget if there are several replicas."""
        labels = self._labels(part)
        budget: Manifest = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
        budget["metadata"] = {"name": f"{self._values.name}-{part}", "labels": labels}
        budget["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
        return [budget] if count > 1 else []

    def _filled(self, file: str, part: str, **more: object) -> list[Manifest]:
        """Return a file of ``manifests/``, filled in."""
        values, wanted = self._values, self._values.resources.get(part, Resources())
        given = {"labels": self._labels(part), "user": _USER, "locked": _LOCKED, "part": part}
        given |= {"name": values.name, "image": values.image, "secret": self._secret, **wanted.model_dump()} | more
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        words |= {key: json.dumps(words[key]) for key in ("cpu", "memory")}  # JSON is YAML
        text = Template((_MANIFESTS / f"{file}.yaml").read_text(encoding="utf-8")).substitute(words)
        return list(YAML(typ="safe", pure=True).load_all(text))

    def _labels(self, part: str) -> dict[str, str]:
        words = {"name": "epd-serve", "instance": self._values.name, "component": part}
        return {f"app.kubernetes.io/{key}": value for key, value in words.items()}

    def _key(self, variable: str, key: str) -> Manifest:
        return {"name": variable, "valueFrom": {"secretKeyRef": {"name": self._secret, "key": key}}}


def _pod(deployment: Manifest) -> Manifest:
    pod: Manifest = deployment["spec"]["template"]["spec"]
    return pod


def _mount(pod: Manifest, name: str, path: str, claim: str, **more: bool) -> None:
    """Mount a claim in the container of a pod."""
    pod["volumes"].append({"name": name, "persistentVolumeClaim": {"claimName": claim, **more}})
    pod["containers"][0]["volumeMounts"].append({"name": name, "mountPath": path, **more})
