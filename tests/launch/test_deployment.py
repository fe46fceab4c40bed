import asyncio
from typing import Any

import pytest

from epd_serve.config import change_config, load_config, parse_config
from epd_serve.launch.apply import ApplyStopped
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes import supervisor
from epd_serve.launch.processes.process import ProcessDied, ProcessState

pytestmark = pytest.mark.usefixtures("fake_program")
CONFIG = "topology: (E-P)-D\ninstances: {base_port: 0}\ngateway: {port: 0}"


async def test_the_gateway_reads_the_deployment_as_it_is_from_a_file_of_the_owner() -> None:
    config = parse_config(CONFIG)
    async with LocalDeployment(config, ready_timeout_s=300) as running:
        written = running.admin_socket.with_name("deployment.yaml")
        read = load_config(written)
        assert written.stat().st_mode & 0o077 == 0
        logs = {file.stem for file in running.log_dir.glob("*.log")}
    assert logs == {*(read.gateway.instances or {}), "gateway"} == {"e0", "p0", "d0", "gateway"}
    assert read.engine == "native", "what auto came to on a CPU"
    without = {"engine": "auto", "gateway": {"instances": None}}
    assert change_config(read, without) == change_config(config, without)
    assert not written.exists() and not running.log_dir.exists()


async def test_a_failed_start_leaves_its_logs_and_no_process(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_D0", "die")
    deployment = LocalDeployment(parse_config(CONFIG), ready_timeout_s=300)
    with pytest.raises(ProcessDied, match="d0 died: exit code 3"):
        await deployment.__aenter__()
    assert fakes.alive == set()
    assert "no memory" in (deployment.log_dir / "d0.log").read_text()


async def test_a_gateway_that_fails_to_start_leaves_the_old_one_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GATEWAY", "once")
    config = parse_config(CONFIG)
    changed = change_config(config, {"gateway": {"max_queue": 7}})
    async with LocalDeployment(config, ready_timeout_s=300) as running:
        for _ in range(2):  # the second time, too, there is something to change
            with pytest.raises(ApplyStopped, match="replace gateway failed"):
                await running.apply(changed)
            assert running.admin_socket.exists(), "the old gateway's"
            file = running.admin_socket.with_name("deployment.yaml")
            assert load_config(file).gateway.max_queue == 4096, "for its next start"


async def test_an_end_calls_a_change_off_and_does_not_wait_for_it(
    fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_E1", "stuck")
    monkeypatch.setitem(supervisor.GRACES_S, "then", 0.5)
    config = parse_config(CONFIG.replace("(E-P)-D", "E-P-D"))
    running = LocalDeployment(config, ready_timeout_s=300)
    async with asyncio.timeout(150):
        try:
            await running.start()
            await running.wait_ready()
            applying = asyncio.create_task(running.apply(change_config(config, {"topology": "2E-P-D"})))
            while not any(
                one.spec.name == "e1" and one.state is ProcessState.LOADING for one in running.processes
            ):
                assert not applying.done(), applying.exception()
                await asyncio.sleep(0.02)
        finally:
            await running.stop()
        with pytest.raises(asyncio.CancelledError):
            await applying
    assert fakes.alive == set()
