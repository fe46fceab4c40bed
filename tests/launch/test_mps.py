"""The MPS daemon of a deployment: started, watched, started again and ended, or another's used.

NVIDIA's program is a stand-in (tests/support/fake_mps.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fake_mps import install
from program import is_alive, until

from device import mps
from epd_serve.config import DeploymentConfig, parse_config
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.processes.supervisor import Backoff, Supervisor
from epd_serve.launch.record import DeploymentRecord, lacks_mps, mps_note

SHARED = "topology: (E-PD)\ndevices: [cuda:0]\nroles: {E: {share: 0.5}}\ngateway: {port: 0}\n"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    variables = {**os.environ, "PATH": install(tmp_path / "bin"), "CUDA_VISIBLE_DEVICES": "1"}
    variables.pop(mps.PIPES, None)
    yield variables
    for file in tmp_path.glob(f"**/{mps.CONTROL}.pid"):  # of a test that failed
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def config() -> DeploymentConfig:
    return parse_config(SHARED)


def begin(config: DeploymentConfig, environment: dict[str, str], directory: Path) -> list[ProcessSpec]:
    """The processes of the services and instances of a deployment."""
    record = DeploymentRecord(
        config=config, ports=choose_ports(config), environment=environment, directory=directory
    )
    return record.begin(config.placement())


def daemon(environment: Mapping[str, str]) -> int:
    """The process number of the daemon; 0: there is none."""
    file = mps.pid_file(environment)
    return int(file.read_text() or 0) if file.exists() else 0


async def test_a_deployment_has_its_own_daemon_before_its_instances(
    config: DeploymentConfig, environment: dict[str, str], tmp_path: Path
) -> None:
    daemon_spec, encode, language = begin(config, environment, tmp_path)
    assert (daemon_spec.name, daemon_spec.stops) == ("mps", "last")
    for spec in (encode, language):
        assert spec.environment[mps.PIPES] == daemon_spec.environment[mps.PIPES] == str(tmp_path / "mps")
        assert spec.environment[mps.SHARE] == "50"
    client = ProcessSpec(  # with an instance's variables, as there is no GPU
        name="client", label="", command=(sys.executable, "-c", CLIENT), environment=encode.environment
    )
    supervisor = Supervisor([daemon_spec, client], tmp_path, backoff=Backoff(first_s=0.1))
    try:
        await supervisor.start()
        await supervisor.wait_ready(30)
        environment = dict(encode.environment)
        first = daemon(environment)
        await until(lambda: "there" in (tmp_path / "client.log").read_text())
        assert (tmp_path / "mps" / "control.log").read_text() == "visible: all\n", "numbers of GPUs are the same"

        os.kill(first, signal.SIGKILL)
        await until(lambda: daemon(environment) not in (0, first))
        second = daemon(environment)
        assert supervisor.num_deaths == 1 and is_alive(second) and not is_alive(first)
        await until(lambda: f"MPS is running as process {second}" in (tmp_path / "mps.log").read_text())
        assert f"MPS process {first} has ended" in (tmp_path / "mps.log").read_text()
    finally:
        await supervisor.stop()
    assert not is_alive(second) and daemon(environment) == 0


CLIENT = """
import os, time
assert os.path.exists(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control"), "it is ready before its clients start"
print("there", flush=True)
time.sleep(600)
"""


async def test_it_ends_with_the_process_that_keeps_it_however_that_ends(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment = environment | mps.own_daemon(tmp_path / "mps", environment)
    command = [sys.executable, "-P", "-m", "device.mps", str(os.getpid())]
    keeper = await asyncio.create_subprocess_exec(*command, env=environment)
    await until(lambda: daemon(environment) > 0)
    pid = daemon(environment)
    keeper.kill()
    await keeper.wait()
    await until(lambda: not is_alive(pid))
    assert daemon(environment) == 0


async def test_a_daemon_of_somebody_else_is_used_and_not_ended(
    config: DeploymentConfig, environment: dict[str, str], tmp_path: Path
) -> None:
    theirs = environment | mps.own_daemon(tmp_path / "theirs", environment)
    (tmp_path / "theirs").mkdir()
    started = await asyncio.create_subprocess_exec(mps.CONTROL, "-d", env=theirs)
    assert await started.wait() == 0
    await until(lambda: daemon(theirs) > 0)
    encode, language = begin(config, theirs, tmp_path)
    assert encode.environment[mps.PIPES] == language.environment[mps.PIPES] == str(tmp_path / "theirs")
    assert mps_note(config, theirs, config.placement()) == f"MPS: on, by the daemon in {tmp_path / 'theirs'}"
    assert is_alive(daemon(theirs))


def test_shares_without_mps_are_refused_and_no_shares_need_none(
    config: DeploymentConfig, environment: dict[str, str], tmp_path: Path
) -> None:
    bare = environment | {"PATH": str(tmp_path)}
    with pytest.raises(ValueError, match="shares of a GPU need MPS, but nvidia-cuda-mps-control"):
        begin(config, bare, tmp_path)
    for without in (SHARED.replace("share: 0.5", ""), SHARED.replace("cuda:0", "cpu")):
        assert len(begin(parse_config(without), bare, tmp_path)) == 2, "no daemon"
    assert lacks_mps(config, environment, config.placement()), "so 'apply' refuses them"
    assert not lacks_mps(config, environment, ())
