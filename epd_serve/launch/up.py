"""``epd-serve up``: run a deployment in the foreground until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from epd_serve.config import DEMO_MODEL, DeploymentConfig, ShapeConfig, model_path
from epd_serve.config.model_files import chat_template
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.process import ProcessDied, ProcessState
from epd_serve.launch.processes.supervisor import Process, run_until
from epd_serve.launch.record import mps_note
from epd_serve.rpc.admin import AdminClient, AdminError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal(Console):
    """The console for a deployment's output, silent once its reader has ended (``epd-serve up | head``)."""

    def say(self, text: str) -> None:
        """Print text unchanged, without breaking long lines, so that they can be copied."""
        self.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


class ShownDeployment(LocalDeployment):
    """A deployment that shows its progress on a terminal."""

    def __init__(self, config: DeploymentConfig, file: Path | None, terminal: Terminal) -> None:
        super().__init__(config, file=file, keep_logs=True)
        self._terminal = terminal

    def on_change(self, process: Process) -> None:
        label = f" ({process.spec.label})" if process.state is ProcessState.STARTING else ""
        starts = (ProcessState.STARTING, ProcessState.LOADING, ProcessState.READY)
        time = f", {process.elapsed_s:.1f} s" if process.state in starts else ""
        self._terminal.say(f"{process.spec.name:<8} {process.state}{label}{time}")

    def on_death(self, death: ProcessDied, delay_s: float) -> None:
        self._terminal.say(f"{death.end}. Restarting it in {delay_s:g} s; its log is {death.log_file}")


async def run_up(
    config: DeploymentConfig, reasons: Sequence[str], file: Path | None, writer: int | None = None
) -> int:
    """Start the deployment, show its progress and first commands, and run it until a signal or a death.

    ``reasons``: the choices made for the user; ``writer``: pipe to the process at the terminal (``--detach``).
    Returns the exit code: 0 after a signal, 1 after a final death. A SIGINT after a signal kills everything.
    Raises ValueError for a taken port or a missing model.
    """
    terminal, stop = Terminal(), asyncio.Event()
    deployment = ShownDeployment(config, file, terminal)
    for line in (*reasons, *(f"note: {note}" for note in notes(config))):
        terminal.say(line)

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set() and number == signal.SIGINT:  # 'epd-serve down' may be run twice
            deployment.kill()
        stop.set()

    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        await deployment.start()
        await run_until(stop, deployment.wait_ready())
        if not stop.is_set():
            stops = "Ctrl-C stops it." if writer is None else "'epd-serve down' stops it."
            terminal.say(ready_text(deployment.config, deployment.gateway_url, deployment.log_dir, stops))
            if writer is not None:
                _leave_terminal(writer, deployment.log_dir)
            if (death := await run_until(stop, deployment.wait_failure())) is not None:
                raise death
        terminal.say(f"Stopping{await _pending(deployment)}. Press Ctrl-C again to end everything at once.")
    except ProcessDied as death:
        terminal.say(f"{death}\nStopping the others.")
        return 1
    finally:
        await deployment.stop()
    return 0


def _leave_terminal(writer: int, log_dir: Path) -> None:
    """Write to ``up.log`` from now on, and release the parent, which waits at the terminal."""
    log = os.open(log_dir / "up.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno(), inheritable=False)
    os.write(writer, b"r")
    os.close(writer)


async def _pending(deployment: LocalDeployment) -> str:
    """Describe the requests to wait for; "" without any."""
    try:
        shown = await AdminClient(deployment.admin_socket).ask("GET", "/requests", timeout_s=1.0)
    except (AdminError, TimeoutError):  # it is still starting
        return ""
    count, waits_s = shown["running"] + shown["waiting"], deployment.config.instances.drain_s
    return f": {count} request{'s' * (count > 1)} may take {waits_s:g} s to finish" if count else ""


def ready_text(config: DeploymentConfig, url: str, log_dir: Path, stops: str) -> str:
    """Return the addresses of API, dashboard and logs, and commands to paste, with ``$API_KEY`` as the key."""
    question = (
        "What is the capital of France?" if config.model == DEMO_MODEL else "How many legs do two spiders have?"
    )
    body: dict[str, Any] = {"model": config.model_name}
    chats = _has_chats(config)
    body |= {"messages": [{"role": "user", "content": question}]} if chats else {"prompt": question}
    header, variable = "", ""
    if config.gateway.api_keys:
        header, variable = '-H "Authorization: Bearer $API_KEY" ', 'OPENAI_API_KEY="$API_KEY" '
    return (
        f"\nReady: {url}/v1 serves model {config.model_name!r} as {config.topology}. {stops}\n"
        f"Dashboard: {url}/dashboard\nLogs: {log_dir}\n"
        f"Ask: curl -s {url}/v1/{'chat/' if chats else ''}completions {header}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}\n"
        + (f"Chat: {variable}epd-serve chat --base-url {url}\n" if chats else "")
    )


def _has_chats(config: DeploymentConfig) -> bool:
    """Return whether the model has a chat template."""
    if config.model == DEMO_MODEL or isinstance(config.model, ShapeConfig):
        return True
    return bool(chat_template(model_path(config.model), config.chat_template))


def notes(config: DeploymentConfig) -> Iterator[str]:
    """Yield notes on settings without effect, and on requests that the deployment cannot serve."""
    placement = config.placement()
    used = {device for instance in placement for device in instance.devices}
    yield from (f"device {device} is unused" for device in config.devices if device not in used)
    roles = {str(instance.role) for instance in placement}
    yield from (f"roles.{role} is unused: no instance has this role" for role in config.roles if role not in roles)
    if isinstance(config.model, ShapeConfig):
        yield "the model lacks weights: answers are derived from hashes, times are those of emulated devices"
    elif not _has_chats(config):
        yield "the model lacks a chat template: chats are refused, /v1/completions works; set chat_template"
    if note_on_mps := mps_note(config, os.environ, placement):
        yield note_on_mps
