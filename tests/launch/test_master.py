"""The mooncake_master of a deployment: started before the instances, and for them alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from program import wait_until
from transports import needs_mooncake

from epd_serve.config import parse_config
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.launch.record import DeploymentRecord
from epd_serve.transfer.mooncake import engine as mooncake

STORE = "feature_store: mooncake\ninstances: {base_port: 0}\ngateway: {port: 0}"


@pytest.mark.parametrize(
    "text", [STORE, "instances: {kv_transfer: {transport: mooncake}, base_port: 0}\ngateway: {port: 0}"]
)
def test_a_missing_package_is_said_before_anything_starts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = lambda name: None if name.startswith("mooncake") else find(name)  # noqa: E731
    monkeypatch.setattr(mooncake.importlib.util, "find_spec", absent)
    with pytest.raises(ValueError, match=r"mooncake is not installed; .* pip install '\.\[mooncake\]'"):
        LocalDeployment(parse_config(text))


@needs_mooncake
def test_a_master_listens_on_the_instances_address_alone(tmp_path: Path) -> None:
    config = parse_config(STORE)
    ports = choose_ports(config)
    record = DeploymentRecord(config=config, ports=ports, environment=dict(os.environ), directory=tmp_path)
    spec, *_ = record.begin(config.placement())
    assert ports.master is not None
    assert (spec.name, spec.stops) == ("master", "last"), "instances give their segments back to it"
    with subprocess.Popen(spec.command, stderr=subprocess.DEVNULL) as started:
        master = psutil.Process(started.pid)

        def listening() -> dict[int, str]:
            return {c.laddr.port: c.laddr.ip for c in master.net_connections("tcp") if c.status == "LISTEN"}

        wait_until(lambda: {*ports.master} <= listening().keys(), "it listens")
        assert {*listening().values()} == {"127.0.0.1"}
        started.kill()
