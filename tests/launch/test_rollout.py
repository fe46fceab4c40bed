"""The launcher's part in an apply before its first step and after its last one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from epd_serve.config import change_config, parse_config
from epd_serve.config.role_files import in_role, remember
from epd_serve.launch.deployment_record import DeploymentRecord, resolved
from epd_serve.launch.processes.ports import Ports
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.processes.supervisor import Supervisor
from epd_serve.launch.rollout import ApplyLimits, ApplyStopped, GatewayOrders, Rollout
from epd_serve.types import Role

CONFIG = resolved(parse_config("topology: 2E-P-D\ninstances: {base_port: 0}\ngateway: {api_key: secret}"))
OTHER = change_config(CONFIG, {"topology": "E-2P-D"})


@dataclass
class Gateway:
    """It takes every order; who orders a switch finds that somebody else has switched the instance back.

    Attributes:
        paths: that were asked for.
        busy: orders of roles are refused, for a reason that may pass.
        changed: an instance that the controller makes a D while a file is checked; then nobody undoes anything.
        slow_s: a reload is refused until so long after the step has begun; half of that goes by with a leave.
    """

    held: DeploymentRecord
    paths: list[str] = field(default_factory=list)
    busy: bool = False
    changed: str = ""
    switches: int = 0
    checked: list[str] = field(default_factory=list)
    slow_s: float = 0.0
    began_s: float = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        if request.path == "/check":
            if self.changed:
                remember(in_role(self.held.live[self.changed].options, Role.parse("D")))
            self.checked.append((await request.json())["topology"])
            return web.json_response({"left": []})
        loop = asyncio.get_running_loop()
        if request.path == "/hold":
            self.began_s = loop.time()
        if request.path.endswith("/leave"):
            await asyncio.sleep(self.slow_s / 2)
        if request.path == "/reload" and loop.time() < self.began_s + self.slow_s:
            return web.json_response({"error": {"message": "not yet"}}, status=503)
        if request.path.endswith("/role") and self.busy:
            return web.json_response({"error": {"message": "a stage would be left alone"}}, status=409)
        if request.path.endswith("/role"):
            self.switches += 1
            options = self.held.live[request.match_info["path"].split("/")[1]].options
            role = Role.parse((await request.json())["role"]) if self.changed else options.role
            remember(in_role(options, role))
        return web.json_response({})


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@dataclass
class Launcher:
    applier: Rollout
    supervisor: Supervisor
    gateway: Gateway
    held: DeploymentRecord


@asynccontextmanager
async def launcher(fakes: Any, tmp_path: Path) -> AsyncIterator[Launcher]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, as the path of a socket must be
        orders = Path(folder) / "orders"
        ports = Ports(gateway=8000, instances=tuple(range(30100, 30104)))
        held = DeploymentRecord(config=CONFIG, ports=ports, environment={}, directory=tmp_path, admin=orders)
        held.begin()
        gateway = Gateway(held)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", gateway.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(orders)).start()
        supervisor = Supervisor([fakes.spec(name) for name in held.live], tmp_path)

        async def before_start(spec: ProcessSpec) -> None:
            pytest.fail(f"{spec.name} is to be switched")

        try:
            yield Launcher(
                Rollout(held, supervisor, GatewayOrders(orders, held), before_start), supervisor, gateway, held
            )
        finally:
            await supervisor.stop()
            await runner.cleanup()


async def test_nothing_is_applied_before_all_processes_have_been_started(fakes: Any, tmp_path: Path) -> None:
    async with launcher(fakes, tmp_path) as own:
        for refused in (own.applier.plan(OTHER), own.applier.apply(OTHER, ApplyLimits())):
            with pytest.raises(ValueError, match="the deployment is still starting"):
                await refused
        assert own.gateway.checked == [] and own.gateway.switches == 0


async def test_what_others_undo_each_time_is_not_said_to_be_done(fakes: Any, tmp_path: Path) -> None:
    async with launcher(fakes, tmp_path) as own:
        await own.supervisor.start()
        await own.supervisor.wait_ready(300)
        with pytest.raises(ApplyStopped, match=r"still to do: switch e\d from E to P\n.* serves on with e0 \(E\)"):
            await own.applier.apply(OTHER, ApplyLimits(deadline_s=30))
        assert own.gateway.switches == 5
        assert own.held.config == CONFIG


async def test_a_plan_has_the_gateway_look_at_the_new_configuration_and_leaves_no_file(
    fakes: Any, tmp_path: Path
) -> None:
    async with launcher(fakes, tmp_path) as own:
        await own.supervisor.start()
        await own.supervisor.wait_ready(300)
        before = files(tmp_path)
        plans = await asyncio.gather(*(own.applier.plan(OTHER) for _ in range(2)))
        assert plans[0].steps == plans[1].steps and len(plans[0].steps) == 1
        assert own.gateway.checked == ["E-2P-D"] * 2
        assert files(tmp_path) == before


async def test_all_that_a_step_consists_of_has_one_deadline(fakes: Any, tmp_path: Path) -> None:
    async with launcher(fakes, tmp_path) as own:
        await own.supervisor.start()
        await own.supervisor.wait_ready(300)
        own.gateway.slow_s = 1.5
        with pytest.raises(ApplyStopped, match=r"stop e1 .*; 1 s are over"):
            await own.applier.apply(change_config(CONFIG, {"topology": "E-P-D"}), ApplyLimits(deadline_s=1))


async def test_what_has_another_role_by_the_time_that_roles_have_new_settings_has_those_of_before(
    fakes: Any, tmp_path: Path
) -> None:
    """The controller is held up only after the file was found to be right."""
    more = change_config(CONFIG, {"topology": "E-P-2D", "roles": {"D": {"max_num_seqs": 7}}})
    async with launcher(fakes, tmp_path) as own:
        await own.supervisor.start()
        await own.supervisor.wait_ready(300)
        own.gateway.changed = "e1"
        said: list[str] = []
        await own.applier.apply(more, ApplyLimits(deadline_s=30), said.append)
        assert any("switch e1 from D" in text for text in said), "it is a D with the settings of before"
        paths = own.gateway.paths
        assert paths[:2] == ["/check", "/hold"] and paths[-1] == "/hold", "it is let go in the end"


async def test_what_is_in_the_way_for_long_is_said_once(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_serve.launch.rollout._LONG_S", 0.05)
    async with launcher(fakes, tmp_path) as own:
        await own.supervisor.start()
        await own.supervisor.wait_ready(300)
        own.gateway.busy = True
        said: list[str] = []
        with pytest.raises(ApplyStopped, match="a stage would be left alone"):
            await own.applier.apply(OTHER, ApplyLimits(deadline_s=2), said.append)
        assert said[2:] == ["waiting: a stage would be left alone"]
