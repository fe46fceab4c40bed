"""What no schema of Kubernetes sees in manifests: names that must meet, and rules of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Of gateways, of instances and of Mooncake's master.
SERVED = {
    ("gateway", "http"): {"/health/live", "/health/ready", "/metrics"},
    ("instances", "health"): {"/health/live", "/health/ready"},
    ("master", "http"): {"/health"},
}
VERSIONS = {
    "ConfigMap": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
LABELS = {f"app.kubernetes.io/{word}" for word in ("name", "instance", "component")}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


_COMPONENT = "app.kubernetes.io/component"


def faults(docs: list[dict[str, Any]]) -> list[str]:
    """Sentences; none where the manifests are right."""
    try:
        return list(_faults(docs))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        return [f"{type(error).__name__}: {error}"]


def _faults(docs: list[dict[str, Any]]) -> Iterator[str]:
    named = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in docs]
    if len(set(named)) != len(named):
        yield "two have one name"
    if len({namespace for _, namespace, _ in named}) > 1:
        yield "namespaces differ"
    apps = {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in docs}
    if len(apps) > 1 or any(one["metadata"]["labels"].keys() != LABELS for one in docs):
        yield "labels"
    if any(one["apiVersion"] != VERSIONS[one["kind"]] for one in docs):
        yield "versions"
    if any(selector.keys() not in (LABELS, LABELS - {_COMPONENT}) for selector in _selectors(docs)):
        yield "a selector that others match, too"
    of = {kind: [one for one in docs if one["kind"] == kind] for kind, _, _ in named}
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in of["Deployment"]}
    files = {one["metadata"]["name"] for one in of["ConfigMap"]}
    for one in of["Deployment"]:
        yield from _workload(one, files)
        if "replicas" not in one["spec"]:
            yield "nobody says how many there are"
    if any(not one["data"]["deployment.yaml"] for one in of["ConfigMap"]):
        yield "no deployment file"
    for one in of["Service"]:
        yield from _service(one, pods)
    gateways = [one for one in of["Service"] if _chosen(one["spec"]["selector"], pods, "gateway")]
    headless = [one for one in gateways if one["spec"].get("clusterIP") == "None"]
    if len(gateways) != 2 or len(headless) != 1 or not headless[0]["spec"]["publishNotReadyAddresses"]:
        yield "one service of the gateway is for clients, one for instances, which come before it is ready"
    joined = {
        container["command"][container["command"].index("--join") + 1]
        for pod in pods.values()
        for container in pod["spec"]["containers"]
        if container["name"] == "instances"
    }
    if joined != {f"http://{headless[0]['metadata']['name']}:{headless[0]['spec']['ports'][0]['port']}"}:
        yield "instances join elsewhere"
    for one in of.get("PodDisruptionBudget", []):
        selected = _matching(one["spec"]["selector"]["matchLabels"], pods)
        if len(selected) != 1 or one["spec"]["maxUnavailable"] < 1:
            yield "a budget that lets nothing go"
    yield from _policies(of["NetworkPolicy"], pods)


def _workload(doc: dict[str, Any], files: set[str]) -> Iterator[str]:
    name, template = doc["metadata"]["name"], doc["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    if doc["spec"]["selector"]["matchLabels"] != {label: labels[label] for label in LABELS}:
        yield f"{name} does not select its own pods"
    rolling = doc["spec"]["strategy"]["rollingUpdate"]
    if rolling["maxSurge"] + rolling["maxUnavailable"] < 1 or doc["spec"]["strategy"]["type"] != "RollingUpdate":
        yield f"{name} cannot be rolled out"
    if doc["spec"].get("replicas", 1) < 1 or pod["terminationGracePeriodSeconds"] < 30:
        yield f"{name} has no time to drain"
    if pod["automountServiceAccountToken"] or pod["enableServiceLinks"]:
        yield f"{name} is told more than it needs"
    user = pod["securityContext"]
    if not user["runAsNonRoot"] or not user["runAsUser"] or not user["runAsGroup"] or not user["fsGroup"]:
        yield f"{name} runs as root"
    if user["seccompProfile"]["type"] != "RuntimeDefault":
        yield f"{name} may call all of the kernel"
    volumes = {one["name"]: one for one in pod["volumes"]}
    for one in volumes.values():
        if "configMap" in one and one["configMap"]["name"] not in files:
            yield f"{name}: there is no file {one}"
        if "configMap" in one and not any(
            mount.get("readOnly") for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == one["name"]
        ):
            yield f"{name} may write {one}"
        if "persistentVolumeClaim" in one and not one["persistentVolumeClaim"]["claimName"]:
            yield f"{name}: no claim"
        if len(one) != 2:
            yield f"{name}: {one} is no volume"
        shm = one.get("emptyDir", {})
        if one["name"] == "shm" and not (shm["medium"] == "Memory" and shm["sizeLimit"]):
            yield f"{name}: /dev/shm is a disk"
    (container,) = pod["containers"]
    yield from _container(name, container, volumes)


def _container(name: str, container: dict[str, Any], volumes: dict[str, Any]) -> Iterator[str]:
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    if {one["name"] for one in mounts.values()} != set(volumes):
        yield f"{name}: mounts and volumes differ"
    needed = {"gateway": {"/tmp", "/etc/epd-serve"}, "instances": {"/tmp", "/etc/epd-serve", "/dev/shm", "/cache"}}
    if needed.get(container["name"], {"/tmp"}) - mounts.keys():
        yield f"{name}: a volume is missing"
    locked = container["securityContext"]
    if locked["allowPrivilegeEscalation"] or not locked["readOnlyRootFilesystem"]:
        yield f"{name} may change itself"
    if locked["capabilities"]["drop"] != ["ALL"]:
        yield f"{name} keeps capabilities"
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    if len(set(ports.values())) != len(container["ports"]):
        yield f"{name}: a port twice"
    for probe in PROBES[container["name"] == "master" :]:
        get = container[probe]["httpGet"]
        if get["port"] not in ports or get["path"] not in SERVED[container["name"], get["port"]]:
            yield f"{name}: nobody answers its {probe}"
        if not container[probe]["periodSeconds"]:
            yield f"{name}: {probe}"
    if (
        container["name"] != "master"
        and "startupProbe" in container
        and not container["startupProbe"]["failureThreshold"]
    ):
        yield f"{name} may not take long to start"
    asked = container["resources"]
    if not asked["requests"]["cpu"] or asked["limits"]["memory"] != asked["requests"]["memory"]:
        yield f"{name} is evicted first"
    variables = {one["name"]: one for one in container["env"]}
    for variable, one in variables.items():
        if any(word in variable for word in ("KEY", "TOKEN")):
            secret = one["valueFrom"]["secretKeyRef"]
            if "value" in one or not secret["name"] or not secret["key"]:
                yield f"{name}: {variable} is no secret"
        elif "value" not in one and not one["valueFrom"]["fieldRef"]["fieldPath"]:
            yield f"{name}: {variable} is nothing"
    for word in container["command"]:
        if word.startswith("$(") and word[2:-1] not in variables:
            yield f"{name}: nothing is {word}"
    wanted = {
        "gateway": {"EPD_SERVE_ADMIN_KEY", "HOME"},
        "instances": {"POD_NAME", "POD_IP", "HOME", "HF_HOME", "HF_TOKEN"},
    }
    if wanted.get(container["name"], set()) - variables.keys():
        yield f"{name}: a variable is missing"
    if container["name"] == "instances":
        if not variables.keys() & {"EPD_SERVE_ADMIN_KEY", "EPD_SERVE_CLUSTER_KEY"}:
            yield f"{name} cannot join"
        if not variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"]:
            yield f"{name} cannot start without a token"
        if str(ports["health"]) != container["command"][container["command"].index("--health-port") + 1]:
            yield f"{name}: its health is elsewhere"
    if not container["image"]:
        yield f"{name} is nothing"


def _service(doc: dict[str, Any], pods: dict[str, Any]) -> Iterator[str]:
    selected = _matching(doc["spec"]["selector"], pods)
    if len(selected) != 1:
        yield f"{doc['metadata']['name']} selects {len(selected)} workloads"
    for pod in selected.values():
        for port in doc["spec"]["ports"]:
            if not port["name"] or not port["port"] or port["targetPort"] not in _ports(pod):
                yield f"{doc['metadata']['name']}: no port {port}"


def _policies(docs: list[dict[str, Any]], pods: dict[str, Any]) -> Iterator[str]:
    """Each pod is covered; a stranger reaches the gateway's API alone."""
    covered: set[str] = set()
    for doc in docs:
        spec = doc["spec"]
        selected = _matching(spec["podSelector"]["matchLabels"], pods)
        covered |= selected.keys()
        if spec["policyTypes"] != ["Ingress"] or not selected:
            yield f"{doc['metadata']['name']} forbids nothing"
        for rule in spec["ingress"]:
            if "from" not in rule:
                open_ports = [one["port"] for one in rule["ports"]]
                if open_ports != ["http"] or any(one["protocol"] != "TCP" for one in rule["ports"]):
                    yield f"{doc['metadata']['name']} opens {open_ports}"
                if set(selected) != {name for name, pod in pods.items() if _component(pod) == "gateway"}:
                    yield f"{doc['metadata']['name']} is not the gateway's alone"
            elif [set(one) for one in rule["from"]] != [{"podSelector"}]:
                yield f"{doc['metadata']['name']} lets strangers in"
            elif _matching(rule["from"][0]["podSelector"]["matchLabels"], pods).keys() != pods.keys():
                yield f"{doc['metadata']['name']} keeps own pods out"
    if covered != pods.keys() or len(docs) != 2:
        yield "pods without a policy"


def _selectors(tree: Any) -> Iterator[dict[str, str]]:
    if isinstance(tree, list):
        for one in tree:
            yield from _selectors(one)
    elif isinstance(tree, dict):
        for key, one in tree.items():
            if key == "matchLabels" or (key == "selector" and "matchLabels" not in one):
                yield one
            else:
                yield from _selectors(one)


def _matching(selector: dict[str, str], pods: dict[str, Any]) -> dict[str, Any]:
    return {name: pod for name, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()}


def _chosen(selector: dict[str, str], pods: dict[str, Any], component: str) -> bool:
    return any(_component(pod) == component for pod in _matching(selector, pods).values())


def _component(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["name"])


def _ports(pod: dict[str, Any]) -> set[str]:
    return {one["name"] for one in pod["spec"]["containers"][0]["ports"]}


def _served(pod: dict[str, Any], port: str) -> set[str]:
    return SERVED.get((_component(pod), port), set())
