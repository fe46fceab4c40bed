"""Deployment files as manifests of Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from epd_serve.cli.app import app
from epd_serve.config import load_config, parse_config
from epd_serve.launch.remote.kubernetes import Values, load_values, manifests, render
from epd_serve.launch.remote.unit import Unit, unit_placement

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(DEPLOY.glob("*.yaml"))
RELEASES = ("1.29", "1.37")
#: What answers at each port of a container.
SERVED = {
    ("gateway", "http"): {"/health/live", "/health/ready", "/metrics"},
    ("instances", "health"): {"/health/live", "/health/ready"},
    ("master", "http"): {"/health"},
}
ALL = Values(namespace="models", gateways=2, cache_claim="hub")


def read(file: Path, values: Values) -> list[dict[str, Any]]:
    return list(YAML(typ="safe", pure=True).load_all(render(file, values)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_deployment_file_is_rendered(file: Path, tmp_path: Path) -> None:
    for values in (Values(), ALL):
        docs = read(file, values)
        check_manifests(docs)
        assert docs == json.loads(json.dumps(docs)), "no types of YAML alone"
    for release in RELEASES if file is FILES[0] else RELEASES[-1:]:
        for doc in docs:
            kubernetes_validate.validate(doc, release, strict=True)
    (tmp_path / "file.yaml").write_text(docs[0]["data"]["deployment.yaml"])
    config = load_config(tmp_path / "file.yaml")
    assert str(config.topology) == str(load_config(file).topology)
    assert config.gateway.instances == {}
    units = [one for one in docs if one["kind"] == "Deployment" and "--unit" in _command(one)]
    assert len(units) == len(config.topology.units)


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents)
        )
        yield


def check_manifests(docs: list[dict[str, Any]]) -> None:
    """Check what no schema sees: that names meet, that pods are locked, that strangers reach the API alone."""
    of: dict[str, list[dict[str, Any]]] = {}
    for doc in docs:
        of.setdefault(doc["kind"], []).append(doc)
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in of["Deployment"]}
    assert len({(one["kind"], one["metadata"]["name"]) for one in docs}) == len(docs)

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()}

    gateways = {name for name, pod in pods.items() if pod["spec"]["containers"][0]["name"] == "gateway"}
    for one in of["Deployment"]:
        assert chosen(one["spec"]["selector"]["matchLabels"]) == {one["metadata"]["name"]}
        check_pod(one["spec"]["template"]["spec"], {file["metadata"]["name"] for file in of["ConfigMap"]})
    for one in of["Service"]:
        [name] = chosen(one["spec"]["selector"])
        ports = {port["name"] for port in pods[name]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
    [headless] = [one for one in of["Service"] if one["spec"].get("publishNotReadyAddresses")]
    joined = f"http://{headless['metadata']['name']}:{headless['spec']['ports'][0]['port']}"
    for one in of["Deployment"]:
        command = _command(one)
        assert "--join" not in command or command[command.index("--join") + 1] == joined
    for one in of.get("PodDisruptionBudget", []):
        assert len(chosen(one["spec"]["selector"]["matchLabels"])) == 1 and one["spec"]["maxUnavailable"] > 0
    covered = set[str]()
    for one in of["NetworkPolicy"]:
        selected = chosen(one["spec"]["podSelector"]["matchLabels"])
        covered |= selected
        for rule in one["spec"]["ingress"]:
            if "from" not in rule:
                assert [port["port"] for port in rule["ports"]] == ["http"] and selected == gateways
            else:
                assert [chosen(peer["podSelector"]["matchLabels"]) for peer in rule["from"]] == [pods.keys()]
    assert covered == pods.keys()


def check_pod(pod: dict[str, Any], files: set[str]) -> None:
    [container] = pod["containers"]
    user, locked = pod["securityContext"], container["securityContext"]
    assert user["runAsNonRoot"] and user["runAsUser"] and user["seccompProfile"]["type"] == "RuntimeDefault"
    assert not pod["automountServiceAccountToken"] and not locked["allowPrivilegeEscalation"]
    assert locked["readOnlyRootFilesystem"] and locked["capabilities"]["drop"] == ["ALL"]
    assert pod["terminationGracePeriodSeconds"] >= 30, "time to drain"
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert {one["configMap"]["name"] for one in pod["volumes"] if "configMap" in one} <= files
    for probe in ("startupProbe", "readinessProbe", "livenessProbe")[container["name"] == "master" :]:
        get = container[probe]["httpGet"]
        assert get["path"] in SERVED[container["name"], get["port"]]
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    variables = {one["name"]: one for one in container["env"]}
    assert all(
        "secretKeyRef" in one["valueFrom"] for name, one in variables.items() if re.search("KEY|TOKEN", name)
    )
    assert {word[2:-1] for word in container["command"] if word.startswith("$(")} <= variables.keys()
    if container["name"] == "instances":
        assert variables.keys() & {"EPD_SERVE_ADMIN_KEY", "EPD_SERVE_CLUSTER_KEY"}, "it can join"
        kept = [variables[name]["value"] for name in ("HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")]
        assert all(one.startswith("/cache") for one in kept), "models and kernels outlive the pod"


def test_secrets_stay_out_of_the_manifests(tmp_path: Path) -> None:
    file = tmp_path / "secret.yaml"
    file.write_text("gateway: {admin: {key: hidden-admin-key, port: 9000}}\ncluster_key: hidden-cluster-key\n")
    text = render(file, Values(name="chat"))
    assert "hidden" not in text
    assert text.count("name: chat-keys") > 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("devices: [cuda:0, cuda:1, cuda:2]", "engine: auto"),
        ("{elastic: {}, slo: {ttft_ms: 900, tpot_ms: 50}}", "elastic is for one machine"),
        ("trace: ./spans", "trace is for one machine"),
        ("{engine: vllm, model: a/b, devices: ['cuda x 3'], roles: {P: {engine_args: {nnodes: 2}}}}", "nnodes"),
        ("tls: {ca: ca.pem, cert: c.pem, key: k.pem}", "tls is for one machine"),
    ],
)
def test_what_is_tied_to_a_machine_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        manifests(file, Values())


def test_devices_rollouts_and_roles(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("{topology: 2(E-P)-3D, engine: native, model: org/name, devices: ['npu x 5']}")
    for values, surge in ((Values(), 0), (Values(spare_devices=True), 1)):
        docs = {one["metadata"]["name"]: one for one in manifests(file, values) if one["kind"] == "Deployment"}
        pairs, decodes = docs["epd-e-p"]["spec"], docs["epd-d"]["spec"]
        assert (pairs["replicas"], decodes["replicas"]) == (2, 3)
        limits = [one["template"]["spec"]["containers"][0]["resources"]["limits"] for one in (pairs, decodes)]
        assert [one["huawei.com/Ascend910"] for one in limits] == ["1", "1"]
        assert decodes["strategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_a_part_counts_its_own_devices_and_bears_its_own_names(tmp_path: Path) -> None:
    config = parse_config("{topology: 2(E-P)-D, devices: [cpu]}")
    here = unit_placement(config, 0, "epd-e-p-7c9d")
    unit = Unit(config, here, "10.0.0.7", {"OMP_NUM_THREADS": "1"}, tmp_path)
    specs = [process.spec for process in unit.processes]
    assert [spec.name for spec in specs] == ["epd-e-p-7c9d-e0", "epd-e-p-7c9d-p0"]
    assert [spec.url for spec in specs] == ["http://10.0.0.7:8100", "http://10.0.0.7:8101"]
    options = [json.loads(spec.command[spec.command.index("--options") + 1]) for spec in specs]
    assert [one["name"] for one in options] == [spec.name for spec in specs]
    emulated = parse_config("{topology: E-2P-D, devices: ['emulated:h200 x 4'], model: {shape_of: qwen2.5-vl-7b}}")
    [one] = Unit(emulated, unit_placement(emulated, 1, "p-1"), "10.0.0.8", {}, tmp_path).processes
    assert json.loads(one.spec.command[one.spec.command.index("--options") + 1])["device"] == "emulated:h200:0"
    with pytest.raises(ValueError, match="lacks replica 0 of unit 7"):
        unit_placement(config, 7, "x")


def test_options_of_the_command_go_over_the_values(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("{name: chat, image: 'here:1'}")
    arguments = ["render", "kubernetes", str(DEPLOY / "cpu-epd.yaml"), "--values", str(values)]
    result = CliRunner().invoke(app, [*arguments, "--namespace", "n1", "--image", "there:2"])
    assert result.exit_code == 0, result.output
    assert "image: there:2" in result.stdout and "namespace: n1" in result.stdout
    values.write_text("{imag: x}")
    with pytest.raises(ValueError, match="imag"):
        load_values(values)


def _command(doc: dict[str, Any]) -> list[str]:
    return list(doc["spec"]["template"]["spec"]["containers"][0]["command"])
