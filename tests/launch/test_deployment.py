import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from epd_serve.config import change_config, load_config, parse_config
from epd_serve.launch import commands, deployment
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes import supervisor
from epd_serve.launch.processes.forking import ForkServer
from epd_serve.launch.processes.process import ProcessDied, ProcessSpec, ProcessState

pytestmark = pytest.mark.usefixtures("fake_program")
CONFIG = "topology: (E-P)-D\ninstances: {base_port: 0}\ngateway: {port: 0, api_key: secret}"


async def test_a_deployment_runs_inside_the_with_block(fakes: Any) -> None:
    async with LocalDeployment(parse_config(CONFIG), ready_timeout_s=300) as deployment:
        assert {name: (str(i.role), i.pid) for name, i in deployment.instances.items()} == {
            "e0": ("E", fakes.pids["e0"]),
            "p0": ("P", fakes.pids["p0"]),
            "d0": ("D", fakes.pids["d0"]),
        }
        assert [process.spec.name for process in deployment.processes] == ["e0", "p0", "d0", "gateway"]
        async with aiohttp.ClientSession() as session:
            for url in (deployment.gateway_url, deployment.instances["p0"].url):
                async with session.get(f"{url}/health") as response:
                    assert response.status == 200
    assert fakes.alive == set()
    assert not deployment.log_dir.exists()


def test_a_machine_without_a_place_for_logs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(ValueError, match=r"no place .*; set EPD_SERVE_LOG_DIR or TMPDIR to a directory"):
        LocalDeployment(parse_config(CONFIG))


async def test_the_gateway_reads_the_deployment_as_it_is_from_a_file_of_the_owner(tmp_path: Path) -> None:
    config = parse_config(CONFIG)
    async with LocalDeployment(config, log_dir=tmp_path / "logs", ready_timeout_s=300):
        pass
    written = tmp_path / "logs" / "deployment.yaml"
    read = load_config(written)
    assert list(read.gateway.instances or {}) == ["e0", "p0", "d0"]
    assert read.engine == "native", "what auto came to on a CPU"
    assert change_config(read, {"engine": "auto", "gateway": {"instances": None}}) == change_config(
        config, {"gateway": {"instances": None}}
    )
    assert written.stat().st_mode & 0o077 == 0
    assert {file.name for file in (tmp_path / "logs").glob("*.log")} == {
        "e0.log",
        "p0.log",
        "d0.log",
        "gateway.log",
    }


async def test_a_failed_start_leaves_its_logs_and_no_process(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_D0", "die")
    monkeypatch.setenv("TMPDIR", str(fakes.folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    deployment = LocalDeployment(parse_config(CONFIG), ready_timeout_s=300)
    with pytest.raises(ProcessDied, match="d0 died: exit code 3"):
        async with deployment:
            pytest.fail("it must not become ready")
    assert fakes.alive == set()
    assert "no memory" in (deployment.log_dir / "d0.log").read_text()


@pytest.mark.parametrize(
    ("text", "expected"), [("", 30.0), ("hang_timeout_s: 5", 5.0), ("hang_timeout_s: null", None)]
)
def test_the_supervisor_is_told_how_long_a_hang_may_last(
    text: str, expected: float | None, tmp_path: Path
) -> None:
    config = parse_config(f"{text}\ninstances: {{base_port: 0}}\ngateway: {{port: 0}}")
    assert LocalDeployment(config, log_dir=tmp_path)._supervisor._hang_timeout_s == expected


@pytest.mark.parametrize("value", ["0", "-1", ".inf", "never"])
def test_a_hang_timeout_is_a_number_of_seconds(value: str) -> None:
    with pytest.raises(ValueError, match="hang_timeout_s"):
        parse_config(f"hang_timeout_s: {value}")


@pytest.fixture
def _as_outside_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all tests run, one process has the engine loaded for their deployments, and forks gateways too."""

    def server_for(self: LocalDeployment, specs: Sequence[ProcessSpec]) -> ForkServer | None:
        return self._new_fork_server(specs[0]) if len(specs) > 1 else None

    monkeypatch.setattr(deployment, "ForkServer", ForkServer)
    monkeypatch.setattr(deployment, "gateway_spec", commands.gateway_spec)
    monkeypatch.setattr(LocalDeployment, "_fork_server_for", server_for)


@pytest.mark.usefixtures("_as_outside_of_tests")
async def test_what_starts_beside_a_fork_server_that_is_starting_is_spawned(tmp_path: Path, fakes: Any) -> None:
    alone = "topology: EPD\ninstances: {base_port: 0}\ngateway: {port: 0}"
    async with LocalDeployment(parse_config(alone), log_dir=tmp_path / "logs", ready_timeout_s=300) as running:
        unusable = tmp_path / "logs" / "fork-server.log"
        unusable.mkdir()
        spec = fakes.spec("e1", can_fork=True)
        await running._make_forkable(spec)
        assert running._fork_server is None
        unusable.rmdir()
        making = asyncio.create_task(running._make_forkable(spec))
        await asyncio.sleep(0)
        assert not making.done()
        spawned = await running._start(spec, tmp_path / "e1.log")
        await making
        assert isinstance(spawned, asyncio.subprocess.Process)
        assert running._fork_server is not None
        spawned.terminate()
        await spawned.wait()


@asynccontextmanager
async def taking_orders(path: Path) -> AsyncIterator[None]:
    """A gateway to which everything is right."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"left": []})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def test_an_end_calls_a_change_off_and_does_not_wait_for_it(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_E1", "stuck")
    monkeypatch.setitem(supervisor.GRACES_S, "then", 600.0)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, as the path of a socket must be
        monkeypatch.setenv("EPD_SERVE_RUNTIME_DIR", f"{folder}/r")
        config = parse_config(CONFIG.replace("(E-P)-D", "E-P-D"))
        async with (
            LocalDeployment(config, log_dir=tmp_path / "logs", ready_timeout_s=300) as running,
            taking_orders(Path(folder) / "r" / running.gateway_url.removeprefix("http://") / "admin"),
            asyncio.timeout(150),
        ):
            applying = asyncio.create_task(running.apply(change_config(config, {"topology": "2E-P-D"})))
            while not any(
                one.spec.name == "e1" and one.state is ProcessState.LOADING for one in running.processes
            ):
                assert not applying.done(), applying.exception()
                await asyncio.sleep(0.02)
            stopping = asyncio.create_task(running.stop())
            while "gateway" in fakes.alive:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            os.kill(fakes.pids["e1"], signal.SIGKILL)
            await stopping
            with pytest.raises(asyncio.CancelledError):
                await applying
            with pytest.raises(ValueError, match="is being stopped"):
                await running.apply(config)
    assert fakes.alive == set()
