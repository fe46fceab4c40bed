"""A new deployment file against the instances that run: some can change, some must be other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from told import told

from epd_serve.config import DeploymentConfig, InstanceOptions, parse_config
from epd_serve.config.role_files import remember
from epd_serve.launch.commands import hccl_variables
from epd_serve.launch.config_diff import (
    Difference,
    changed_options,
    check_open_api,
    check_same_deployment,
    difference,
)
from epd_serve.launch.deployment_record import DeploymentRecord, resolved
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.vllm.installed import VllmFound
from epd_serve.topology.change import ChangeImpossible
from epd_serve.topology.remembered import remembered_role
from epd_serve.types import Role

FREE = "instances: {base_port: 0}"


def record(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> DeploymentRecord:
    """As if a deployment of that file ran, with no process of it."""
    config = resolved(parse_config(text))
    ports = Ports(gateway=8000, instances=tuple(range(30100, 30100 + config.topology.num_instances)))
    held = DeploymentRecord(config=config, ports=ports, environment=environment or {}, directory=tmp_path)
    held.begin()
    for one in held.live.values():
        if one.slot:
            Path(one.slot.rpartition(":")[0]).touch()
    return held


def compared(held: DeploymentRecord, text: str) -> Difference:
    return difference(held, parse_config(text))


def steps(held: DeploymentRecord, text: str) -> list[str]:
    return [str(step) for step in compared(held, text).steps]


def apply(held: DeploymentRecord, text: str) -> Difference:
    """Do to the books what the launcher does."""
    found = compared(held, text)
    held.replace_role_settings(parse_config(text))
    for step in found.steps:
        match str(step).split()[0]:
            case "start":
                held.joined(found.to_start[step.name])
            case "switch":
                held.switched(step.name, step.role)
            case _:
                held.left(step.name)
    held.config = parse_config(text)
    return found


def options(held: DeploymentRecord, name: str) -> InstanceOptions:
    return told(held.spec(name).command)


def test_roles_change_in_place_and_names_stay(tmp_path: Path) -> None:
    held = record(tmp_path, f"topology: 2E-P-D\n{FREE}")
    assert steps(held, f"topology: 2E-P-D\n{FREE}") == []
    assert steps(held, f"topology: E-2P-D\n{FREE}") == ["switch e1 from E to P"]
    assert steps(held, f"topology: E-P-D\n{FREE}") == ["stop e1 (E)"]
    found = apply(held, f"topology: 3E-P-D\n{FREE}")
    [(name, started)] = found.to_start.items()
    assert name == "e2" and started.options.port not in (8000, *range(30100, 30104))
    assert (options(held, "e2").name, str(options(held, "e2").role)) == ("e2", "E")


def test_other_parentheses_are_other_processes_and_the_same_ones_stay(tmp_path: Path) -> None:
    held = record(tmp_path, f"topology: E-P-D\n{FREE}")
    found = apply(held, f"topology: (E-P)-D\n{FREE}")
    assert sorted(map(str, found.steps)) == ["start e1 (E)", "start p1 (P)", "stop e0 (E)", "stop p0 (P)"]
    boards = [options(held, name).device_board for name in ("e1", "p1", "d0")]
    assert boards == [f"{tmp_path}/device-0:0", f"{tmp_path}/device-0:1", None]
    assert steps(held, f"topology: (E-P)-2D\n{FREE}") == ["start d1 (D)"], "the group is the same one"
    (tmp_path / "device-0").touch()
    found = apply(held, f"topology: (E-P-P)-D\n{FREE}")
    assert [str(step) for step in found.steps] == ["start p0 (P)"]
    assert options(held, "p0").device_board == f"{tmp_path}/device-0:2", "a slot of its own on the same board"
    roles = apply(held, f"topology: (E-D-P)-P\n{FREE}").steps
    assert {str(step).split()[0] for step in roles} == {"switch"}, "roles change within parentheses too"


def test_settings_of_a_role_come_by_a_switch_and_those_of_a_process_by_a_start(tmp_path: Path) -> None:
    held = record(tmp_path, f"topology: E-P-2D\n{FREE}")
    more = f"topology: E-P-2D\n{FREE}\nroles: {{D: {{max_num_seqs: 7}}}}"
    assert steps(held, more) and all(step.startswith("switch") for step in steps(held, more))
    apply(held, more)
    decodes = [name for name in held.live if str(options(held, name).role) == "D"]
    assert len(decodes) == 2
    assert {options(held, name).max_num_seqs for name in decodes} == {7}, "also when it is started again"
    assert steps(held, more) == []
    stores = f"topology: E-P-2D\n{FREE}\nroles: {{E: {{feature_store_bytes: 8MiB}}, D: {{max_num_seqs: 7}}}}"
    assert [step.split()[0] for step in steps(held, stores)] == ["switch", "switch"]
    waits = f"topology: E-P-2D\n{FREE}\nroles: {{E: {{queue_timeout_s: 7}}, D: {{max_num_seqs: 7}}}}"
    assert [step.split()[0] for step in steps(held, waits)] == ["start", "stop"]
    images = f"topology: E-P-2D\n{FREE}\nroles: {{E: {{num_blocks: 9}}, D: {{max_num_seqs: 7}}}}"
    assert steps(held, images) == [], "an encoder has no KV blocks"


def test_the_roles_are_those_that_instances_have_by_now(tmp_path: Path) -> None:
    held = record(tmp_path, f"topology: 2E-P-D\n{FREE}")
    remember(held.live["e1"].options.model_copy(update={"role": Role.parse("D")}))
    assert steps(held, f"topology: E-P-2D\n{FREE}") == []
    assert len(steps(held, f"topology: 2E-P-D\n{FREE}")) == 1
    assert str(options(held, "e1").role) == "D"


def test_what_is_started_again_has_all_settings_of_its_role(tmp_path: Path) -> None:
    """Those that a process reads once it has from then on, and another file that asks for them is content."""
    text = f"{FREE}\nroles: {{P: {{queue_timeout_s: 77}}}}"
    held = record(tmp_path, f"topology: 2E-P-D\n{text}")
    held.switched("e1", Role.parse("P"))
    assert str(options(held, "e1").role) == "P" and options(held, "e1").queue_timeout_s == 77.0
    assert steps(held, f"topology: E-2P-D\n{text}") == ["start p1 (P)", "stop e1 (P)"], "as long as it lives"
    held.restarts("e1")
    assert steps(held, f"topology: E-2P-D\n{text}") == []


def test_devices_decide_who_can_become_what(tmp_path: Path) -> None:
    three = "devices: [cuda:0, cuda:1, cuda:2]"
    held = record(tmp_path, f"topology: E-P-D\n{three}\n{FREE}")
    assert steps(held, f"topology: EP-D\n{three}\n{FREE}") == [
        "switch e0 from E to EP",
        "switch p0 from P to D",
        "stop d0 (D)",
    ]
    assert steps(held, f"topology: E-P-D\ndevices: [cuda:0, cuda:1, cuda:3]\n{FREE}") == [
        "start d1 (D)",
        "stop d0 (D)",
    ]
    alone = record(tmp_path, f"topology: EPD\ndevices: [cuda:0]\n{FREE}")
    with pytest.raises(ChangeImpossible, match="list another device"):
        steps(alone, "topology: EPD\ndevices: [cuda:0]\ninstances: {base_port: 0, media_cpu_s: 1}")


def test_memory_that_is_parted_among_those_on_a_device_needs_no_other_process(tmp_path: Path) -> None:
    held = record(tmp_path, f"topology: (E-P-D)\ndevices: [cuda:0]\n{FREE}")
    assert options(held, "p0").memory_share == 0.45
    found = steps(held, f"topology: (E-PD)\ndevices: [cuda:0]\n{FREE}")
    assert found and all(step.split()[0] in ("switch", "stop") for step in found), found
    with pytest.raises(ChangeImpossible, match="list another device"):
        steps(held, f"topology: (E-P-D)\ndevices: [cuda:0]\nroles: {{P: {{memory_share: 0.3}}}}\n{FREE}")


def test_on_npus_every_process_has_ports_of_its_own(tmp_path: Path) -> None:
    devices = "devices: [npu:0, npu:1, npu:2, npu:3]"
    held = record(tmp_path, f"topology: E-P-D\n{devices}\n{FREE}")
    apply(held, f"topology: E-P-2D\n{devices}\n{FREE}")
    ports = [hccl_variables(one.placement)["HCCL_IF_BASE_PORT"] for one in held.live.values()]
    assert len(set(ports)) == 4


def test_threads_that_were_divided_stay_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    held = record(tmp_path, f"topology: EPD\n{FREE}")
    found = compared(held, f"topology: E-P-D\n{FREE}")
    assert found.notes == ("CPU threads stay as they were (epd0 8); started anew, instances would have 2",)
    wished = "topology: EPD\ninstances: {base_port: 0, threads: 3}"
    assert steps(held, wished) == ["start epd1 (EPD)", "stop epd0 (EPD)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("served_model_name: other", "start a deployment of its own for another model"),
        ("dtype: bfloat16", "a change of dtype needs another start"),
        ("instances: {host: 127.0.0.2}", "a change of instances.host"),
        ("feature_store: mooncake", "feature_store"),
        (
            "gateway: {shutdown_delay_s: 7, shutdown_grace_s: 8}",
            "gateway.shutdown_delay_s, gateway.shutdown_grace_s",
        ),
        ("slo: {ttft_ms: 9, tpot_ms: 9}\nelastic: {enabled: true}", "a change of elastic.enabled"),
        ("elastic: {drift: {enabled: true}}", "a change of elastic.drift.enabled"),
        ("cluster_key: a-key-of-many-letters", "a change of cluster_key"),
        ("engine: vllm\nvllm: {kv: nixl}", "a change of engine, vllm.kv"),
    ],
)
def test_what_all_processes_have_in_common_needs_another_start(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_same_deployment(DeploymentConfig(), parse_config(text))


VLLM = f"engine: vllm\n{FREE}"


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], DeploymentRecord]:
    """Makes the record of a deployment of vLLM instances."""
    engine = VllmFound(vllm="0.32.0", vllm_ascend="", mooncake=True, nixl=True, epd_serve=True, python="3")
    monkeypatch.setattr(
        "epd_serve.launch.vllm.process.check_engines", lambda config, known=None: {sys.executable: engine}
    )
    monkeypatch.setattr("epd_serve.launch.vllm.process.check_models", lambda config, engines: None)

    def make(text: str) -> DeploymentRecord:
        config = resolved(parse_config(text))
        ports = Ports(gateway=8000, instances=tuple(range(30100, 30100 + 16 * len(config.placement()), 16)))
        held = DeploymentRecord(config=config, ports=ports, environment={}, directory=tmp_path)
        held.begin()
        return held

    return make


def test_vllm_instances_that_hold_p_and_d_change_their_role(
    vllm: Callable[[str], DeploymentRecord],
) -> None:
    held = vllm(f"topology: E-2P-D\n{VLLM}")
    before = held.spec("p1")
    assert steps(held, f"topology: E-2P-D\n{VLLM}") == []
    assert steps(held, f"topology: E-P-2D\n{VLLM}") == ["switch p1 from P to D"]
    apply(held, f"topology: E-P-2D\n{VLLM}")
    assert held.spec("p1").command == before.command, "its process does not notice"
    found = apply(held, f"topology: E-P-3D\n{VLLM}")
    [(name, started)] = found.to_start.items()
    ports = [one.options.port for one in held.live.values()]
    assert (name, len(ports)) == ("d1", 5) and started.options.name == "d1"
    assert all(abs(a - b) >= 16 for a, b in combinations(ports, 2)), "each has its sixteen"
    assert str(remembered_role(held.directory, "d1")) == "None", "only the launcher's rollout starts it"
    held.starts(started)
    assert str(remembered_role(held.directory, "d1")) == "D"


def test_other_vllm_instances_start_before_those_of_before_stop(vllm: Callable[[str], DeploymentRecord]) -> None:
    def in_turn(held: DeploymentRecord, text: str) -> list[str]:
        return [step.split()[0] for step in steps(held, text)]

    held = vllm(f"topology: E-2P-D\n{VLLM}")
    assert in_turn(held, f"topology: 2E-P-D\n{VLLM}") == ["start", "stop"], "E has no language model"
    seqs = f"topology: E-2P-D\n{VLLM}\nroles: {{D: {{max_num_seqs: 7}}}}"
    assert steps(held, seqs) == ["start d1 (D)", "stop d0 (D)"]
    own = vllm(seqs)
    mixed = seqs.replace("E-2P-D", "E-P-2D")
    assert in_turn(own, mixed) == ["start", "stop"], "P and D have other settings"
    with pytest.raises(ValueError, match=r"hand on features by store and KV by None; the file's .* and mooncake"):
        check_same_deployment(parse_config(f"topology: E-PD\n{VLLM}"), held.config)


KEYS = "{api_keys: [{name: alice, hash: 'sha256:%s'}]}" % ("0" * 64)


def test_each_changed_option_is_named_and_no_secret_shown() -> None:
    old = parse_config(f"gateway: {KEYS}")
    both = KEYS.replace("]}", ", {name: bob, hash: 'sha256:%s'}], max_queue: 10}" % ("1" * 64))
    text = f"{{topology: E-P-2D, gateway: {both}, cluster_key: {'k' * 32}, roles: {{E: {{threads: 2}}}}}}"
    new = parse_config(text)
    said = changed_options(old, new)
    assert {line.partition(":")[0] for line in said} == {
        "topology",
        "roles",
        "cluster_key",
        "gateway.api_keys",
        "gateway.max_queue",
    }
    assert "gateway.api_keys: alice -> alice, bob" in said and 'topology: "E-P-D" -> "E-P-2D"' in said
    assert not any("sha256" in line or "kkk" in line for line in said)
    assert changed_options(old, old) == ()


def test_an_api_that_would_become_open_is_refused_beyond_loopback_and_else_said() -> None:
    local, everywhere = parse_config(f"gateway: {KEYS}"), parse_config(f"gateway: {KEYS[:-1]}, host: 0.0.0.0}}")
    for old in (local, everywhere):
        assert check_open_api(old, old) == ()
        assert check_open_api(parse_config(""), old) == ()
    (warning,) = check_open_api(local, parse_config(""))
    assert "OPEN" in warning and "127.0.0.1 port 8000" in warning
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 port 8000"):
        check_open_api(everywhere, parse_config("gateway: {host: 0.0.0.0}"))
    with pytest.raises(ValueError, match="api_keys"):
        check_open_api(everywhere, parse_config(""))
