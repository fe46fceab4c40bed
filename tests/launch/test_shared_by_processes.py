"""The things that all processes of a deployment share, those included that come later."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_serve.config import load_config, parse_config
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.rpc.cluster import CLUSTER_KEY

pytestmark = pytest.mark.usefixtures("fake_program")
FREE = "gateway: {port: 0}"


async def test_a_key_that_is_changed_in_its_file_stays_the_one_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that die are started again, and find the others with the key that these have."""
    file, key = tmp_path / "key", "the-key-at-the-start"
    file.write_text(key)
    config = parse_config(f"cluster_key: {{file: {file}}}\ninstances: {{base_port: 0}}\n{FREE}")
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        file.write_text("another-key-since-then")
        *_, gateway = deployment.processes
        keys = {process.spec.environment[CLUSTER_KEY] for process in deployment.processes}
        assert keys == {key}
        written = deployment.admin_socket.with_name("deployment.yaml")
        monkeypatch.setenv(CLUSTER_KEY, gateway.spec.environment[CLUSTER_KEY])
        assert load_config(written).read_cluster_key() == key and key not in written.read_text()
