"""The mooncake_master of a deployment: started before the instances, tied to them, and told to no one else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fleet import wait_until
from transports import needs_mooncake

from epd_serve.config import parse_config
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.launch.record import DeploymentRecord
from epd_serve.transfer.mooncake import engine as mooncake

STORE = "feature_store: mooncake\ninstances: {base_port: 0}\ngateway: {port: 0}"


@pytest.mark.parametrize("text", [STORE, "instances: {kv_transfer: {transport: mooncake}}"])
def test_a_missing_package_is_said_before_anything_starts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = lambda name: None if name.startswith("mooncake") else find(name)  # noqa: E731
    monkeypatch.setattr(mooncake.importlib.util, "find_spec", absent)
    with pytest.raises(ValueError, match=r"mooncake is not installed; .* pip install '\.\[mooncake\]'"):
        LocalDeployment(parse_config(text))


@needs_mooncake
def test_a_master_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    config = parse_config(STORE)
    ports = choose_ports(config)
    record = DeploymentRecord(config=config, ports=ports, environment=dict(os.environ), directory=tmp_path)
    spec, *_ = record.begin(config.placement())
    assert ports.master is not None
    assert (spec.name, spec.stops) == ("master", "last"), "instances give their segments back to it"
    starter = (
        "import subprocess, sys\n"
        f"command = {list(spec.command)!r}\n"
        "import os; command[command.index('epd_serve.lifeline') + 1] = str(os.getpid())\n"
        "print(subprocess.Popen(command).pid, flush=True); sys.stdin.read()"
    )
    program = [sys.executable, "-c", starter]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        master = psutil.Process(int(parent.stdout.readline()))

        def listening() -> dict[int, str]:
            return {c.laddr.port: c.laddr.ip for c in master.net_connections("tcp") if c.status == "LISTEN"}

        wait_until(lambda: {*ports.master} <= listening().keys(), "it listens")
        assert "mooncake_master" in master.name() and {*listening().values()} == {"127.0.0.1"}
        parent.kill()
    master.wait(timeout=60)
