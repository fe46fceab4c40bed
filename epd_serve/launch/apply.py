"""``epd-serve apply``: change a serving deployment by starting, switching and stopping instances.

The gateway's admin API carries out switches and stops. A change of the gateway's own options starts another
gateway on the same listening socket; the old one ends after its last stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epd_serve.backends.vllm_command import Connectors
from epd_serve.config import DeploymentConfig, change_config
from epd_serve.config.options import write_role_settings
from epd_serve.launch.choices import resolve
from epd_serve.launch.native import PreparedInstance
from epd_serve.launch.processes.ports import next_port
from epd_serve.launch.processes.process import ProcessDied, ProcessState
from epd_serve.launch.processes.supervisor import Supervisor
from epd_serve.launch.record import DeploymentRecord, lacks_mps
from epd_serve.protocol.addresses import is_loopback
from epd_serve.rpc.admin import AdminClient, AdminRefused, AdminUnreachable
from epd_serve.topology.change import Step, StepKind, plan_change

#: Limit of one step, which may read large weights from a slow disk.
_STEP_S = 600.0
#: Time for running answers to finish at an instance before others continue them.
_PATIENCE_S = 1.0
_RETRY_S = 0.1
_REPLACE_GATEWAY = "replace gateway"
#: Statuses while the gateway is starting again, or the instance is switching to another role.
_PASSING = frozenset({409, 429, 502, 503})
#: Options whose values are never shown.
_SECRETS = frozenset({"cluster_key", "key"})
#: Options that a running deployment can change. A prefix ends with a dot.
_CHANGEABLE = ("topology", "devices", "roles", "instances.", "slo.", "gateway.")
_FIXED = ("instances.host", "gateway.host", "gateway.port", "gateway.admin.")
#: Options that the gateway reads from its instances; their change does not replace it.
_OF_INSTANCES = ("topology", "devices", "roles", "instances.")


class ApplyStopped(ValueError):
    """A step failed. Earlier steps stay, the deployment serves, and another apply continues from there."""


def changed_options(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (option, line) for each changed option of two dumped deployments.

    A line reads ``gateway.max_queue: 4096 -> 10``.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from changed_options(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, f"{path}: {_shown(path, old)} -> {_shown(path, new)}"


def _shown(path: str, value: Any) -> str:
    if path == "gateway.api_keys":
        return ", ".join(key["name"] for key in value or ()) or "none"
    if _SECRETS & {*path.split(".")}:
        return "none" if value is None else "a secret"
    return json.dumps(value)


def check_open_api(old: DeploymentConfig, new: DeploymentConfig) -> list[str]:
    """Return a warning if the new deployment no longer requires an API key.

    Raises ValueError if the gateway listens beyond the loopback interface.
    """
    if not old.gateway.api_keys or new.gateway.api_keys:
        return []
    where = f"{old.gateway.host} port {old.gateway.port}"
    if not is_loopback(old.gateway.host):
        raise ValueError(
            f"without API keys in the file, the API at {where} would be open to everybody who can reach it: add "
            "gateway.api_keys; to open the API, stop the deployment and start it from the file"
        )
    return [f"THE API BECOMES OPEN: without API keys in the file, every user of this machine can use {where}"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The change from the running deployment to another one.

    Attributes:
        lines: changed options and warnings, for people.
        to_start: the instances to start, by name.
        replaces_gateway: whether an option of the gateway itself changes.
    """

    config: DeploymentConfig
    lines: list[str]
    steps: tuple[Step, ...]
    to_start: Mapping[str, PreparedInstance]
    replaces_gateway: bool


class Applier:
    """Carries out one change of a local deployment at a time."""

    def __init__(self, record: DeploymentRecord, supervisor: Supervisor) -> None:
        self._record = record
        self._supervisor = supervisor
        self._admin = AdminClient(record.admin)
        self._task: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    async def serve(self, path: Path) -> None:
        """Serve ``epd-serve apply`` at a Unix socket in a directory of this user, in lines of JSON."""
        self._server = await asyncio.start_unix_server(self._answer, path, limit=1 << 24)

    async def close(self) -> None:
        """Cancel the current change, and close the socket."""
        if self._server is not None:
            self._server.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(text: str, **more: Any) -> None:
            writer.write(json.dumps({"say": text, **more}).encode() + b"\n")

        try:
            request = json.loads(await reader.readline())
            values = request["config"] or self._record.config.model_dump(exclude_unset=True)
            config = change_config(DeploymentConfig.model_validate(values), request["changes"])
            if request["dry_run"]:
                plan = self.plan(config)
                gateway = [_REPLACE_GATEWAY] if plan.replaces_gateway else []
                for line in [*plan.lines, *map(str, plan.steps), *gateway] or ["nothing to change"]:
                    say(line)
            else:
                await self.apply(config, say)
            say("", done=True)
        except (ValueError, asyncio.CancelledError) as error:
            say(str(error) or "the deployment is being stopped", failed=True)
        finally:
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

    def plan(self, config: DeploymentConfig) -> Plan:
        """Plan the change to ``config``. Raises ValueError for an impossible change."""
        record, old = self._record, self._record.config
        if any(one.num_starts < 2 and not one.ready.is_set() for one in self._supervisor.processes):
            raise ValueError("the deployment is still starting; wait until it is ready")
        lines: list[str] = []
        stays: dict[str, Any] = {"gateway": {"host": old.gateway.host, "port": old.gateway.port}}
        if (config.gateway.host, config.gateway.port) != (old.gateway.host, old.gateway.port):
            lines.append(f"the gateway stays at {old.gateway.host} port {record.ports.gateway}")
        if config.engine == "auto":
            stays["engine"] = old.engine
        config, _ = resolve(change_config(config, stays))
        placement = config.placement()
        changes = dict(changed_options(old.model_dump(mode="json"), config.model_dump(mode="json")))
        other = [path for path in changes if not path.startswith(_CHANGEABLE) or path.startswith(_FIXED)]
        used = [Connectors.between(one.placement(), one.vllm.kv) for one in (old, config)]
        if config.engine == "vllm" and len({(one.features, one.kv) for one in used}) > 1:
            other.append("the connectors that hand on features and KV")
        if other:
            raise ValueError(
                f"a change of {', '.join(other)} needs a restart: stop the deployment and start it again"
            )
        lines += [*check_open_api(old, config), *changes.values()]
        if lacks_mps(config, record.environment, placement):
            raise ValueError("shares of a GPU need MPS, which is not running; restart the deployment")
        record.read_roles()
        wanted = record.prepare(config, placement, [1] * len(placement))
        change = plan_change([one.part for one in record.live.values()], [one.part for one in wanted])
        return Plan(
            config=config,
            lines=lines,
            steps=change.steps,
            to_start=self._prepare_new(config, change.names),
            replaces_gateway=any(not path.startswith(_OF_INSTANCES) for path in changes),
        )

    def _prepare_new(self, config: DeploymentConfig, names: tuple[str, ...]) -> Mapping[str, PreparedInstance]:
        """Prepare the new instances of ``config``, with unused ports and numbers."""
        record, placement, ports = self._record, [], []
        if record.live.keys() >= {*names}:
            return {}
        taken = {one.port for one in record.live.values()} | {record.ports.gateway}
        numbers = {one.placement.index for one in record.live.values()}
        renamed = {one.name: name for one, name in zip(config.placement(), names, strict=True)}
        for one in config.placement():
            name, shared = renamed[one.name], tuple(renamed[other] for other in one.shares_device_with)
            if (kept := record.live.get(name)) is not None:
                port, index = kept.port, kept.placement.index
            else:
                port, index = next_port(config, taken, name), min({*range(len(numbers) + 1)} - numbers)
            taken.add(port)
            numbers.add(index)
            placement.append(replace(one, name=name, shares_device_with=shared, index=index))
            ports.append(port)
        prepared = record.prepare(config, placement, ports)
        return {one.name: one for one in prepared if one.name not in record.live}

    async def apply(self, config: DeploymentConfig, say: Callable[[str], None]) -> None:
        """Change the deployment to ``config``; ``say`` is called with each line and step.

        Raises ValueError for an impossible change or during another one, and ApplyStopped if a step fails.
        """
        if self._task is not None and not self._task.done():
            raise ValueError("another apply is running; wait for its end")
        self._task = asyncio.create_task(self._apply(config, say))
        await asyncio.shield(self._task)  # a caller that leaves does not stop a change midway

    async def _apply(self, config: DeploymentConfig, say: Callable[[str], None]) -> None:
        plan, record = self.plan(config), self._record
        for line in plan.lines:
            say(line)
        old, record.config = record.config, plan.config
        write_role_settings(record.directory, plan.config.settings_by_role())
        doing: Step | str = ""
        try:
            if old.elastic is not None:  # it would switch roles meanwhile
                await self._supervisor.remove("autoscale")
            for number, doing in enumerate(plan.steps, start=1):
                say(f"step {number} of {len(plan.steps)}: {doing}")
                async with asyncio.timeout(_STEP_S):
                    await self._carry_out(doing, plan)
            if plan.replaces_gateway:
                doing = _REPLACE_GATEWAY
                say(doing)
                gateway = record.next_gateway()
                await self._supervisor.replace(gateway, _STEP_S)
                record.use_gateway(gateway)
        except (AdminRefused, ProcessDied, TimeoutError, OSError) as error:
            kept = {"gateway": old.gateway, "slo": old.slo}
            record.config = plan.config.model_copy(update=kept) if doing == _REPLACE_GATEWAY else old
            write_role_settings(record.directory, record.config.settings_by_role())
            record.read_roles()
            record.write_gateway_file()  # the old gateway reads it when it is restarted
            now = ", ".join(f"{name} ({one.role})" for name, one in record.live.items())
            raise ApplyStopped(
                f"{doing} failed: {str(error) or 'it took too long'}\nThe deployment keeps serving with {now}; "
                "apply a file again to continue from there"
            ) from error
        finally:
            if old.elastic is not None:
                await self._supervisor.add(record.autoscale(), _STEP_S)

    async def _carry_out(self, step: Step, plan: Plan) -> None:
        record, order = self._record, {"deadline_s": _STEP_S, "patience_s": _PATIENCE_S}
        if step.kind is StepKind.START:
            instance = plan.to_start[step.name]
            record.add(instance)
            try:
                await self._supervisor.add(instance.spec, _STEP_S)
            except BaseException:
                record.remove(step.name)
                raise
            await self._send_instances()
            while True:
                shown = await self._ask_gateway("GET", "/instances")
                if any(one["name"] == step.name and one["state"] == "up" for one in shown["instances"]):
                    return
                await asyncio.sleep(_RETRY_S)
        if step.kind is StepKind.SWITCH:
            await self._ask_gateway("POST", f"/instances/{step.name}/role", order | {"role": str(step.role)})
            record.read_roles()
            return
        if self._supervisor.process(step.name).state is ProcessState.READY:
            await self._ask_gateway("POST", f"/instances/{step.name}/leave", order)
        record.remove(step.name)
        await self._send_instances()
        await self._supervisor.remove(step.name)

    async def _send_instances(self) -> None:
        """Send the list of instances to the gateway, and write it to the file that a restarted gateway reads."""
        record = self._record
        record.write_gateway_file()
        instances = {name: {"url": one.spec.url, "role": str(one.role)} for name, one in record.live.items()}
        body = {"topology": str(record.config.topology), "instances": instances}
        await self._ask_gateway("PUT", "/instances", body)

    async def _ask_gateway(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the gateway's answer, repeating the call after failures that may pass."""
        while True:
            try:
                return await self._admin.ask(method, path, body, _STEP_S)
            except AdminUnreachable:
                pass
            except AdminRefused as refusal:
                if refusal.status not in _PASSING:
                    raise
            await asyncio.sleep(_RETRY_S)


async def ask_apply(path: Path, request: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Send ``request`` to a launcher: ``config`` (None: the running one), ``changes``, ``dry_run``.

    Raises ValueError with the launcher's reason, or if the launcher ends.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 24)
    except OSError as error:
        raise ValueError(f"nothing answers at {path} ({error})") from error
    writer.write(json.dumps(request).encode() + b"\n")
    try:
        while line := await reader.readline():
            news = json.loads(line)
            if news.get("failed"):
                raise ValueError(news["say"])
            if news.get("done"):
                return
            say(news["say"])
        raise ValueError("the deployment has ended")
    finally:
        writer.close()
