"""``epd-serve render kubernetes``: a deployment file as manifests, with a workload for each device group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import LiteralScalarString

from device.datasheets import emulated_kind, is_measured
from epd_serve import __version__
from epd_serve.config import DEMO_MODEL, DeploymentConfig, load_config
from epd_serve.config.keys import ADMIN_KEY, JOIN_KEY
from epd_serve.config.model_files import HubModel
from epd_serve.launch.processes.ports import ports_each
from epd_serve.launch.remote.unit import BASE_PORT
from epd_serve.launch.vllm.process import FEATURE_DIR, connectors_of
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import place_units

Manifest = dict[str, Any]

_HTTP, _ADMIN, _HEALTH, _STORE, _STORE_HTTP = 8000, 8001, 8099, 50051, 9003
_FILE, _MODELS, _CACHE, _FEATURES = "/etc/epd-serve/deployment.yaml", "/models", "/cache", "/features"
_API_KEY = "EPD_SERVE_API_KEY"
#: Seconds that a gateway still serves while its service stops sending to it.
_DELAY_S = 5
#: Beyond what a process needs by itself until its container is killed.
_GRACE_S = 15
#: Arguments of vLLM for one engine on several hosts.
_OVER_HOSTS = {"nnodes", "node_rank", "master_addr"}
#: The values of llm-d's label, by the stages of a pod; it has none for E with D.
_LLM_D = {
    "E": "encode",
    "P": "prefill",
    "D": "decode",
    "EP": "encode-prefill",
    "PD": "prefill-decode",
    "EPD": "encode-prefill-decode",
}
_LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_USER = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}


_FROZEN = ConfigDict(extra="forbid", frozen=True)


class Resources(BaseModel):
    """A container's requests; its accelerators follow from the topology."""

    model_config = _FROZEN

    cpu: str = "1"
    memory: str = "2Gi"


class Keda(BaseModel):
    """A ScaledObject for each device group."""

    model_config = _FROZEN

    prometheus: str = Field(description="URL that KEDA asks.")
    queued_s: float = Field(default=2.0, gt=0, description="Seconds of queued work of each replica, on average.")
    max_replicas: int = Field(default=4, ge=1, description="Of a device group; its count is the smallest number.")


class InferencePool(BaseModel):
    """An InferencePool of the Gateway API's inference extension, whose endpoints are the gateway's pods."""

    model_config = _FROZEN

    picker: str = Field(description="Service of the endpoint picker.")
    port: int = Field(default=9002, ge=1, le=65535, description="Of that service.")


class Values(BaseModel):
    """The file of ``--values``: what a cluster has that no deployment file says."""

    model_config = _FROZEN

    name: str = Field(
        default="epd", pattern=r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", description="What all names begin with."
    )
    namespace: str | None = Field(default=None, description="null: that of 'kubectl apply'.")
    image: str = Field(default=f"epd-serve:{__version__}", description="Of instances.")
    gateway_image: str | None = Field(default=None, description="null: the same.")
    gateways: int = Field(default=1, ge=1, description="Replicas of the gateway.")
    secret: str | None = Field(
        default=None, description="Secret with admin, cluster, api and hf-token, as needed; null: NAME-keys."
    )
    model_claim: str | None = Field(
        default=None, description="PersistentVolumeClaim with model directories; null: NAME-models."
    )
    cache_claim: str | None = Field(
        default=None, description="PersistentVolumeClaim for the hub's cache; null: each pod downloads anew."
    )
    feature_claim: str | None = Field(
        default=None, description="ReadWriteMany claim for encoder output of NPUs; null: NAME-features."
    )
    shm: str = Field(default="4Gi", description="Size of /dev/shm of an instance's pod.")
    resources: dict[str, Resources] = Field(
        default_factory=dict, description="By device group, as in e, p, d, e-p or gateway."
    )
    accelerators: dict[str, str] = Field(
        default={"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}, description="Names of device plugins."
    )
    spare_devices: bool = Field(
        default=False,
        description="Whether a rollout finds free devices: the old pod then stays until the new is ready.",
    )
    pod_monitor: bool = Field(default=False, description="Whether there is a Prometheus operator.")
    keda: Keda | None = None
    inference_pool: InferencePool | None = None


def load_values(path: Path) -> Values:
    """Raises ValueError that names file, key and fault."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        return Values.model_validate(content or {})
    except ValidationError as error:
        faults = (f"{path}: {'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in error.errors())
        raise ValueError("\n".join(faults)) from error
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def render(file: Path, values: Values) -> str:
    """The manifests as YAML. Raises ValueError for a deployment that cannot run on Kubernetes as it is."""
    yaml, text = YAML(), StringIO()
    yaml.width = 4096
    yaml.dump_all(manifests(file, values), text)
    return f"# epd-serve render kubernetes {file.name}\n{text.getvalue()}"


def manifests(file: Path, values: Values) -> list[Manifest]:
    """As :func:`render`."""
    config = load_config(file)
    _check(config)
    return _Cluster(file, config, values).manifests()


def _check(config: DeploymentConfig) -> None:
    """Raise ValueError for what is tied to one machine."""
    kinds = {device.partition(":")[0] for one in config.placement() for device in one.devices}
    if config.engine == "auto" and kinds & {"cuda", "npu"}:
        raise ValueError("engine: auto looks at the machine that it is on; write engine: native or engine: vllm")
    if config.tls is not None:
        raise ValueError("tls: pods have addresses that no certificate names; take it out, and use a service mesh")
    if config.elastic.enabled:
        raise ValueError("elastic is a process of 'epd-serve up'; here KEDA scales: see --values, keda")
    files = {
        "trace": config.trace,
        "generation_config": None if config.generation_config in ("auto", "off") else config.generation_config,
        "gateway.access_log": None if config.gateway.access_log in (None, "-") else config.gateway.access_log,
        "gateway.media.allowed_file_dirs": config.gateway.media.allowed_file_dirs or None,
        "devices": next((one for one in config.devices if is_measured(emulated_kind(one))), None),
    }
    for key, path in files.items():
        if path is not None:
            raise ValueError(f"{key} names a file of this machine, which no pod has; take it out of the file")
    for role in {str(one.role) for one in config.placement()}:
        for argument in sorted(_OVER_HOSTS & config.settings_for(role).engine_args.keys()):
            raise ValueError(
                f"engine_args of {role}: {argument} spreads an instance over hosts, which takes a "
                "LeaderWorkerSet; here an instance is one pod: take it out, and keep @tp within a node's devices"
            )


class _Cluster:
    """The manifests of one deployment."""

    def __init__(self, file: Path, config: DeploymentConfig, values: Values) -> None:
        self._config = config
        self._values = values
        self._name = values.name
        self._secret = values.secret or f"{values.name}-keys"
        self._file = self._file_in_cluster(
            YAML(typ="safe", pure=True).load(file.read_text(encoding="utf-8")) or {}
        )

    def manifests(self) -> list[Manifest]:
        """In an order in which they can be applied."""
        text = StringIO()
        YAML().dump(self._file, text)
        data = {"deployment.yaml": LiteralScalarString(text.getvalue())}
        docs = [{**self._object("v1", "ConfigMap", "deployment"), "data": data}, *self._gateway()]
        if self._config.starts_master:
            docs += self._master()
        seen: list[str] = []
        for unit, replicas in enumerate(place_units(self._config.topology, self._config.devices)):
            part = "-".join(str(one.role).lower() for one in replicas[0])
            seen.append(part)
            part += f"-{seen.count(part)}" if seen.count(part) > 1 else ""
            docs += self._instances(unit, part, replicas[0], len(replicas))
        docs += self._policies()
        if self._values.pod_monitor:
            docs.append(self._monitor())
        if self._values.inference_pool is not None:
            docs.append(self._pool(self._values.inference_pool))
        return docs

    # ------------------------------------------------------------------ the deployment file in the cluster

    def _file_in_cluster(self, own: Manifest) -> Manifest:
        """The user's file, with the addresses, paths and secrets that things have here."""
        config = self._config
        gateway: Manifest = {**(own.get("gateway") or {})}
        gateway |= {"host": "0.0.0.0", "port": _HTTP, "instances": {}}
        gateway["admin"] = {"host": "0.0.0.0", "port": _ADMIN, "key": {"env": ADMIN_KEY}}
        if config.engine == "vllm":
            gateway["admin"]["join_key"] = {"env": JOIN_KEY}
        if config.gateway.api_key is not None:
            gateway["api_key"] = {"env": _API_KEY}
        instances = {**(own.get("instances") or {}), "base_port": BASE_PORT}
        instances.pop("host", None)
        made = {**own, "gateway": gateway, "instances": instances}
        if self._in_directory:
            made["model"] = f"{_MODELS}/{Path(config.checkpoint).name}"
        if config.starts_master:
            made["mooncake"] = {**(own.get("mooncake") or {}), "master": f"{self._name}-master:{_STORE}"}
        if config.engine == "vllm":
            vllm = {key: value for key, value in (own.get("vllm") or {}).items() if key != "python"}
            variables = {**(vllm.pop("environment", None) or {})}
            variables.pop("HCCL_IF_IP", None)  # that of the pod
            made["vllm"] = {**vllm, **({"environment": variables} if variables else {})}
        else:
            made["cluster_key"] = {"env": CLUSTER_KEY}
        return made

    def _secret_of_instances(self) -> Manifest:
        """With which an instance joins."""
        is_vllm = self._config.engine == "vllm"
        return self._key(JOIN_KEY, "join") if is_vllm else self._key(CLUSTER_KEY, "cluster")

    @property
    def _in_directory(self) -> bool:
        """Whether the model is a directory, and no name on the hub."""
        model = self._config.model
        if not isinstance(model, str) or model == DEMO_MODEL:
            return False
        return Path(model).is_absolute() or HubModel.parse(model) is None

    # ------------------------------------------------------------------ the workloads

    def _gateway(self) -> list[Manifest]:
        gateway = self._config.gateway
        env = [self._key(ADMIN_KEY, "admin")]
        env.append(self._secret_of_instances())
        if gateway.api_key is not None:
            env.append(self._key(_API_KEY, "api"))
        container = {
            "name": "gateway",
            "image": self._values.gateway_image or self._values.image,
            "command": ["epd-serve", "proxy", "--config", _FILE],
            "env": env,
            "ports": [_port("http", _HTTP), _port("admin", _ADMIN)],
            "startupProbe": _probe("/health/live", "http", periodSeconds=2, failureThreshold=60),
            "readinessProbe": _probe("/health/ready", "http", periodSeconds=2, timeoutSeconds=2),
            "livenessProbe": _probe("/health/live", "http", periodSeconds=10, timeoutSeconds=5),
            # The service looks away meanwhile.
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_DELAY_S)]}}},
        }
        grace_s = gateway.shutdown_grace_s + _DELAY_S + _GRACE_S
        docs = self._workload("gateway", container, self._values.gateways, grace_s, surges=True)
        service = self._service(self._name, "gateway", [("http", 80)])
        admin = self._service(f"{self._name}-admin", "gateway", [("admin", _ADMIN)])
        # Each instance is at every gateway, also at those that wait for instances to be ready.
        admin["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        return [*docs, service, admin]

    def _instances(self, unit: int, part: str, members: Sequence[InstancePlacement], count: int) -> list[Manifest]:
        kind = members[0].devices[0].partition(":")[0]
        is_vllm = self._config.engine == "vllm"
        env = [
            self._secret_of_instances(),
            _field("POD_NAME", "metadata.name"),
            _field("POD_IP", "status.podIP"),
            {**self._key("HF_TOKEN", "hf-token")},
            {"name": "HF_HOME", "value": _CACHE},
        ]
        env[3]["valueFrom"]["secretKeyRef"]["optional"] = True
        if kind == "npu":
            env.append(_field("HCCL_IF_IP", "status.podIP"))
        command = ["epd-serve", "instance", "--config", _FILE, "--unit", str(unit), "--name", "$(POD_NAME)"]
        command += ["--host", "$(POD_IP)", "--join", f"http://{self._name}-admin:{_ADMIN}"]
        step = ports_each(self._config)
        ports = [_port(one.name, BASE_PORT + step * index) for index, one in enumerate(members)]
        volumes = {
            "/dev/shm": {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self._values.shm}},
            _CACHE: _claimed("cache", self._values.cache_claim),
        }
        if self._in_directory:
            claim = self._values.model_claim or f"{self._name}-models"
            volumes[_MODELS] = {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        if is_vllm and connectors_of(self._config).features == "file":
            env.append({"name": FEATURE_DIR, "value": _FEATURES})
            volumes[_FEATURES] = _claimed("features", self._values.feature_claim or f"{self._name}-features")
        container = {
            "name": "instances",
            "image": self._values.image,
            "command": [*command, "--health-port", str(_HEALTH)],
            "env": env,
            "ports": [*ports, _port("health", _HEALTH)],
            # Weights of any size may have to be downloaded first.
            "startupProbe": _probe("/health/ready", "health", periodSeconds=2, failureThreshold=1800),
            "readinessProbe": _probe("/health/ready", "health", periodSeconds=2, timeoutSeconds=2),
            "livenessProbe": _probe("/health/live", "health", periodSeconds=10, timeoutSeconds=5),
        }
        plugin = self._values.accelerators.get(kind)
        limits = {plugin: str(max(len(one.devices) for one in members))} if plugin else {}
        stages = "".join(stage for stage in "EPD" if any(stage in str(one.role) for one in members))
        drain_s = max(self._config.settings_for(str(one.role)).drain_s for one in members)
        docs = self._workload(
            part,
            container,
            count,
            drain_s + _GRACE_S,
            surges=not plugin or self._values.spare_devices,
            volumes=volumes,
            limits=limits,
            labels={"llm-d.ai/role": _LLM_D[stages]} if stages in _LLM_D else {},
        )
        if self._values.keda is not None:
            del docs[0]["spec"]["replicas"]
            docs.append(self._scaled(part, count, self._values.keda))
        return docs

    def _scaled(self, part: str, count: int, keda: Keda) -> Manifest:
        """KEDA adds pods to a workload by the work that waits for its instances."""
        pods = f"{self._name}-{part}-[a-z0-9]+-[a-z0-9]+(-[a-z]+[0-9]+)?"
        query = f'sum(max by (instance) (epd_serve_pending_seconds{{instance=~"{pods}"}}))'
        trigger = {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {"serverAddress": keda.prometheus, "query": query, "threshold": f"{keda.queued_s:g}"},
        }
        scaled = self._object("keda.sh/v1alpha1", "ScaledObject", part)
        scaled["spec"] = {
            "scaleTargetRef": {"name": f"{self._name}-{part}"},
            "minReplicaCount": count,
            "maxReplicaCount": max(count, keda.max_replicas),
            "triggers": [trigger],
        }
        return scaled

    def _master(self) -> list[Manifest]:
        """Mooncake Store's, which instances find by its service."""
        options = {"rpc_port": _STORE, "metrics_port": _STORE_HTTP, "eviction_high_watermark_ratio": "1.0"}
        container = {
            "name": "master",
            "image": self._values.image,
            "command": [
                "mooncake_master",
                *(f"--{key}={value}" for key, value in options.items()),
                "--logtostderr",
            ],
            "env": [],
            "ports": [_port("store", _STORE), _port("http", _STORE_HTTP)],
            "readinessProbe": _probe("/health", "http", periodSeconds=2, timeoutSeconds=2),
            "livenessProbe": _probe("/health", "http", periodSeconds=10, timeoutSeconds=5),
        }
        docs = self._workload("master", container, 1, 30, surges=False)
        return [*docs, self._service(f"{self._name}-master", "master", [("store", _STORE)])]

    def _workload(
        self,
        part: str,
        container: Manifest,
        count: int,
        grace_s: float,
        *,
        surges: bool,
        volumes: Mapping[str, Manifest] | None = None,
        limits: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[Manifest]:
        """A Deployment, and a disruption budget where one pod can go while others stay.

        Args:
            surges: whether a new pod can be there beside the old ones.
            volumes: by where they are mounted. limits: accelerators. labels: more of the pods.
        """
        mounts: dict[str, Manifest] = {"/tmp": {"name": "tmp", "emptyDir": {}}, **(volumes or {})}
        if part != "master":
            config = {"name": "config", "configMap": {"name": f"{self._name}-deployment"}}
            mounts[str(Path(_FILE).parent)] = config
        wanted = self._values.resources.get(part, Resources())
        requests = {"cpu": wanted.cpu, "memory": wanted.memory}
        container = container | {
            "env": [*container["env"], {"name": "HOME", "value": "/tmp"}],
            "resources": {"requests": requests, "limits": {"memory": wanted.memory, **(limits or {})}},
            "securityContext": _LOCKED,
            "volumeMounts": [
                {"name": volume["name"], "mountPath": path, **({"readOnly": True} if _is_fixed(volume) else {})}
                for path, volume in mounts.items()
            ],
        }
        selector = {"matchLabels": self._labels(part)}
        doc = self._object("apps/v1", "Deployment", part)
        doc["spec"] = {
            "replicas": count,
            "selector": selector,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": int(surges), "maxUnavailable": int(not surges)},
            },
            "template": {
                "metadata": {"labels": {**self._labels(part), **(labels or {})}},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": _USER,
                    "terminationGracePeriodSeconds": round(grace_s),
                    "containers": [container],
                    "volumes": list(mounts.values()),
                },
            },
        }
        if count == 1:
            return [doc]
        budget = self._object("policy/v1", "PodDisruptionBudget", part)
        budget["spec"] = {"maxUnavailable": 1, "selector": selector}
        return [doc, budget]

    # ------------------------------------------------------------------ around them

    def _policies(self) -> list[Manifest]:
        """Strangers reach the gateway's API alone."""
        everyone = {key: value for key, value in self._labels("").items() if not key.endswith("component")}
        ours = [{"podSelector": {"matchLabels": everyone}}]
        inner = self._object("networking.k8s.io/v1", "NetworkPolicy", "instances")
        inner["spec"] = {
            "podSelector": {"matchLabels": everyone},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": ours}],
        }
        outer = self._object("networking.k8s.io/v1", "NetworkPolicy", "gateway")
        outer["spec"] = {
            "podSelector": {"matchLabels": self._labels("gateway")},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"port": "http", "protocol": "TCP"}]}],
        }
        return [inner, outer]

    def _monitor(self) -> Manifest:
        monitor = self._object("monitoring.coreos.com/v1", "PodMonitor", "gateway")
        # The label instance is ours: one of the gateway's instances, and not the pod that was asked.
        endpoint = {"port": "http", "path": "/metrics", "honorLabels": True}
        monitor["spec"] = {
            "selector": {"matchLabels": self._labels("gateway")},
            "podMetricsEndpoints": [endpoint],
        }
        return monitor

    def _pool(self, picker: InferencePool) -> Manifest:
        """Gateways of the Gateway API send to our gateway's pods as they would to model servers."""
        pool = self._object("inference.networking.k8s.io/v1", "InferencePool", "gateway")
        pool["spec"] = {
            "selector": {"matchLabels": self._labels("gateway")},
            "targetPorts": [{"number": _HTTP}],
            # Without its answer any pod is as good.
            "endpointPickerRef": {
                "name": picker.picker,
                "port": {"number": picker.port},
                "failureMode": "FailOpen",
            },
        }
        return pool

    def _service(self, name: str, part: str, ports: Sequence[tuple[str, int]]) -> Manifest:
        doc = self._object("v1", "Service", part, name)
        listed = [{"name": port, "port": number, "targetPort": port} for port, number in ports]
        doc["spec"] = {"selector": self._labels(part), "ports": listed}
        return doc

    def _object(self, version: str, kind: str, part: str, name: str | None = None) -> Manifest:
        metadata: Manifest = {"name": name or f"{self._name}-{part}", "labels": self._labels(part)}
        if self._values.namespace is not None:
            metadata["namespace"] = self._values.namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def _labels(self, part: str) -> dict[str, str]:
        words = {"name": "epd-serve", "instance": self._name, "component": part}
        return {f"app.kubernetes.io/{key}": value for key, value in words.items()}

    def _key(self, variable: str, key: str) -> Manifest:
        return {"name": variable, "valueFrom": {"secretKeyRef": {"name": self._secret, "key": key}}}


def _is_fixed(volume: Manifest) -> bool:
    return "configMap" in volume or bool(volume.get("persistentVolumeClaim", {}).get("readOnly"))


def _claimed(name: str, claim: str | None) -> Manifest:
    return {"name": name, **({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}})}


def _field(variable: str, path: str) -> Manifest:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number}


def _probe(path: str, port: str, **more: int) -> Manifest:
    return {"httpGet": {"path": path, "port": port}, **more}
