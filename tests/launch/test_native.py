import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from epd_serve.config import InstanceOptions, parse_config
from epd_serve.config.shares import DeviceShare
from epd_serve.launch.dry_run import dry_run
from epd_serve.launch.native import prepare_native
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.record import DeploymentRecord, with_trust


def told(command: Sequence[str]) -> InstanceOptions:
    """The options in the command line of an instance's process."""
    return InstanceOptions.model_validate_json(command[command.index("--options") + 1])


def specs(
    text: str, environment: dict[str, str] | None = None, directory: Path | None = None
) -> tuple[ProcessSpec, ...]:
    config = parse_config(text)
    placement = config.placement()
    given = with_trust(config, environment or {})
    prepared = prepare_native(config, placement, range(8100, 8100 + len(placement)), given, directory)
    return tuple(instance.spec for instance in prepared)


@pytest.mark.parametrize(("topology", "path"), [("E-P-D", "/health?role=EPD"), ("P-D", "/health")])
def test_the_gateway_waits_for_an_encoder_where_there_is_one(topology: str, path: str, tmp_path: Path) -> None:
    """Else P would encode the first images."""
    config = parse_config(f"topology: {topology}")
    ports = Ports(gateway=8000, instances=tuple(range(8100, 8103)))
    record = DeploymentRecord(config=config, ports=ports, environment={}, directory=tmp_path, listener=7)
    assert record.next_gateway().first_health == path


def test_the_cores_are_divided_among_the_instances(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    text = "topology: E-P-D\nroles: {E: {threads: 1}}"
    instances = specs(text)
    assert [told(spec.command).threads for spec in instances] == [1, 2, 2]
    assert [spec.environment["OMP_NUM_THREADS"] for spec in instances] == ["1", "2", "2"]
    for more, environment, threads in (("topology: 9E-P-D", {}, 1), ("", {"OMP_NUM_THREADS": "5"}, 5)):
        assert {told(spec.command).threads for spec in specs(more, environment)} == {threads}
    options = [told(spec.command) for spec in specs(text, {}, tmp_path)]
    assert [(one.threads, one.core_board) for one in options] == [(1, None), *[(8, tmp_path / "cores")] * 2]


def test_children_keep_the_environment_and_stay_offline() -> None:
    spec, *_ = specs("", {"PATH": "/bin", "HF_HUB_OFFLINE": "0"})
    assert (spec.environment["PATH"], spec.environment["HF_HUB_OFFLINE"]) == ("/bin", "1")
    assert "glibc.malloc.hugetlb=1" in spec.environment["GLIBC_TUNABLES"]
    assert "CUDA_VISIBLE_DEVICES" not in spec.environment
    spec, *_ = specs("", {"GLIBC_TUNABLES": "glibc.malloc.perturb=7"})
    assert spec.environment["GLIBC_TUNABLES"] == "glibc.malloc.perturb=7"


@pytest.mark.parametrize(
    ("text", "resident"),
    [
        ("{}", ["role"] * 3),
        ("gateway: {admin: {port: 9000}}", ["all"] * 3),
        ("roles: {D: {resident: all}}", ["role", "role", "all"]),
        ("{gateway: {admin: {port: 9000}}, instances: {resident: role}}", ["role"] * 3),
        (
            "{topology: E-P-D, devices: ['cuda:0', 'cuda:1', cpu], gateway: {admin: {port: 9000}}}",
            ["role", "role", "all"],
        ),
    ],
)
def test_weights_of_all_roles_stay_on_cpus_where_roles_may_be_switched(text: str, resident: list[str]) -> None:
    assert [told(spec.command).resident for spec in specs(text)] == resident


@pytest.mark.parametrize(("device", "forked"), [("cpu", True), ("cuda:0", True), ("npu:0", False)])
def test_instances_are_forked_but_for_those_on_npus(device: str, forked: bool) -> None:
    (instance,) = specs(f"topology: EPD\ndevices: [{device}]")
    assert instance.can_fork is forked


def test_a_process_sees_its_device_alone() -> None:
    instances = specs("topology: (E-P)-D\ndevices: [cuda:1, npu:3]", {"CUDA_VISIBLE_DEVICES": "4, GPU-ab"})
    assert [
        (
            told(spec.command).device,
            spec.environment["CUDA_VISIBLE_DEVICES"],
            spec.environment.get("ASCEND_RT_VISIBLE_DEVICES"),
        )
        for spec in instances
    ] == [("cuda:0", "GPU-ab", None), ("cuda:0", "GPU-ab", None), ("npu:0", "4, GPU-ab", "3")]
    assert instances[0].label == "E on cuda:1"
    with pytest.raises(ValueError, match="cuda:2: CUDA_VISIBLE_DEVICES=4,5 shows only 2 devices"):
        specs("topology: EPD\ndevices: [cuda:2]", {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_instances_in_parentheses_get_their_shares_and_a_board_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    shared = specs("topology: (E-D)-P\nroles: {E: {share: 0.25}}", {}, tmp_path)
    options = [told(spec.command) for spec in shared]
    shares = [DeviceShare(share=0.25, start=0.0), DeviceShare(share=0.75, start=0.25), None]
    assert [one.device_share for one in options] == shares
    assert [one.threads for one in options] == [2, 6, 8]
    assert [one.device_board for one in options] == [f"{tmp_path}/device-d0:1", f"{tmp_path}/device-d0:0", None]
    wishing = specs("{topology: (E-D)-P, roles: {E: {share: 0.25}}, instances: {threads: 4}}", {}, tmp_path)
    assert [told(spec.command).threads for spec in wishing] == [2, 4, 4], "none beyond its share's cores"


def test_the_cluster_key_is_in_the_environment_of_instances_and_nowhere_else() -> None:
    key = "a-secret-of-this-cluster"
    text = f"cluster_key: {key}\ngateway: {{port: 0}}"
    instances = specs(text)
    assert {spec.environment["EPD_SERVE_CLUSTER_KEY"] for spec in instances} == {key}
    assert key not in repr(instances) + " ".join(word for spec in instances for word in spec.command)
    lines = "\n".join(dry_run(parse_config(text), None, {}))
    assert key not in lines and lines.count("EPD_SERVE_CLUSTER_KEY") == 3


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("topology: (E-P)-D\ndevices: [cuda:0, cuda:1]", [0.15, 0.75, None]),
        ("topology: (E-P-D)\ndevices: [npu:0]", [0.082, 0.409, 0.409]),
        ("topology: (P-D)\ndevices: [cuda:0]\nroles: {P: {memory_share: 0.7}}", [0.7, 0.2]),
        ("topology: (P-D)", [None, None]),
    ],
)
def test_instances_on_one_accelerator_know_their_part_of_its_memory(text: str, shares: list[float | None]) -> None:
    """Each would take what it sees free, and they start side by side: none waits for another."""
    instances = specs(text)
    assert [told(spec.command).memory_share for spec in instances] == shares
    assert not any(spec.measures for spec in instances)


@pytest.fixture
def npu_model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def npu_specs(model: Path, topology: str, devices: str, more: str = "") -> tuple[ProcessSpec, ...]:
    return specs(f"{{topology: {topology}, model: {model}, devices: {devices}, instances: {{{more}}}}}")


def test_processes_have_hccl_ports_and_devices_of_their_own(npu_model: Path) -> None:
    e, p, d = npu_specs(npu_model, "(E-P)-D", "['npu:0', 'npu:1']")
    for name in ("HCCL_NPU_SOCKET_PORT_RANGE", "HCCL_IF_BASE_PORT"):
        assert len({spec.environment[name] for spec in (e, p, d)}) == 3
    assert [spec.environment["ASCEND_RT_VISIBLE_DEVICES"] for spec in (e, p, d)] == ["0", "0", "1"]
    mixed = npu_specs(npu_model, "E-PD", "['cuda:0', 'npu:0']")
    assert ["HCCL_IF_BASE_PORT" in spec.environment for spec in mixed] == [False, True]
    assert [told(spec.command).tokens_per_block for spec in mixed] == [16, 128]
