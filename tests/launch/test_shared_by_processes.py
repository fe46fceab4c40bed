"""The things that all processes of a deployment share, those included that come later."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_serve.config import load_config, parse_config
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.rpc.cluster import CLUSTER_KEY

pytestmark = pytest.mark.usefixtures("fake_program")
FREE = "gateway: {port: 0}"


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, as the path of a socket must be
        monkeypatch.setenv("EPD_SERVE_RUNTIME_DIR", f"{folder}/r")
        yield Path(folder) / "r"


async def test_a_key_that_is_changed_in_its_file_stays_the_one_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that die are started again, and find the others with the key that these have."""
    file, key = tmp_path / "key", "the-key-at-the-start"
    file.write_text(key)
    config = parse_config(f"cluster_key: {{file: {file}}}\ninstances: {{base_port: 0}}\n{FREE}")
    async with LocalDeployment(config, log_dir=tmp_path / "logs", ready_timeout_s=300) as deployment:
        file.write_text("another-key-since-then")
        *_, gateway = deployment.processes
        keys = {process.spec.environment[CLUSTER_KEY] for process in deployment.processes}
        keys.add(deployment._record.spec("p0").environment[CLUSTER_KEY])
        assert keys == {key}
        written = tmp_path / "logs" / "deployment.yaml"
        monkeypatch.setenv(CLUSTER_KEY, gateway.spec.environment[CLUSTER_KEY])
        assert load_config(written).read_cluster_key() == key and key not in written.read_text()


async def test_a_deployment_serves_where_its_control_socket_cannot_be(tmp_path: Path, runtime: Path) -> None:
    config = parse_config(f"topology: EPD\ninstances: {{base_port: 0}}\n{FREE}")
    deployment = LocalDeployment(config, log_dir=tmp_path / "logs", ready_timeout_s=300)
    assert deployment.no_control == ""
    shutil.rmtree(runtime)
    async with deployment:
        assert deployment.no_control.endswith("control: No such file or directory")
        assert len(deployment.processes) == 2
