"""``epd-serve up``: run a deployment in the foreground until Ctrl-C; what dies is started again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from epd_serve.config import DEMO_MODEL, DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.hints import Questions, demo_questions, next_steps
from epd_serve.launch.process import ProcessDied
from epd_serve.launch.progress import Progress

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_up(config: DeploymentConfig, console: Console) -> int:
    """Start, show progress, say what to type next, and stay until a signal or a death.

    Returns the exit code: 0 after a signal, 1 when a process died for good. A second signal ends everything at
    once. Raises ValueError where a port is taken or the model is not there.
    """
    for note in _notes(config):
        _say(console, f"note: {note}")
    stop = asyncio.Event()
    with Progress(console) as progress:
        deployment = LocalDeployment(
            config,
            on_change=progress.update,
            on_death=lambda death, delay_s: _say(console, _restart_text(death, delay_s)),
            on_apply=lambda text: _say(console, f"apply: {text}"),
        )
        with _handled(_SIGNALS, lambda: deployment.kill() if stop.is_set() else stop.set()):
            try:
                await _until(stop, _ready(deployment))
                progress.close()
                if not stop.is_set():
                    if why := deployment.no_control:
                        _say(console, f"note: epd-serve apply cannot change this deployment: {why}")
                    _say(console, _ready_text(deployment))
                    await _until(stop, _raise_failure(deployment))
                _say(console, "Stopping.")
            except ProcessDied as death:
                progress.close()
                _say(console, f"{death}\nStopping the others.")
                return 1
            finally:
                await deployment.stop()
    return 0


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end or until ``stop``, whichever comes first; its exception is raised."""
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ready(deployment: LocalDeployment) -> None:
    await deployment.start()
    await deployment.wait_ready()


async def _raise_failure(deployment: LocalDeployment) -> None:
    raise await deployment.wait_failure()


@contextmanager
def _handled(signals: tuple[signal.Signals, ...], handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    # nohup has SIGHUP ignored, so that the program outlives its terminal.
    signals = tuple(n for n in signals if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)
    for number in signals:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _restart_text(death: ProcessDied, delay_s: float) -> str:
    return f"{death.name} died: {death.how}. Starting it again in {delay_s:g} s; its log is {death.log_file}"


def _ready_text(deployment: LocalDeployment) -> str:
    config = deployment.config
    is_demo = config.model == DEMO_MODEL
    questions = demo_questions(deployment.log_dir / "picture.png") if is_demo else Questions()
    steps = next_steps(
        deployment.gateway_url,
        config.model_name,
        questions,
        images=not config.topology.text_only,
        needs_key=config.gateway.needs_key,
    )
    return (
        f"\nReady: {deployment.gateway_url}/v1 serves model {config.model_name!r} as {config.topology}. "
        f"Logs: {deployment.log_dir}. Ctrl-C stops.\n\n{steps}\n"
    )


def _notes(config: DeploymentConfig) -> list[str]:
    """Notes on parts of the deployment that have no effect, and on requests that it cannot serve."""
    placement = config.placement()
    used = {device for instance in placement for device in instance.devices}
    notes = [f"device {device} stays unused" for device in config.devices if device not in used]
    roles = {str(instance.role) for instance in placement}
    notes += [f"roles.{role} has no effect: no instance has it" for role in config.roles if role not in roles]
    if config.topology.text_only:
        notes.append(f"topology {config.topology} has no E, so requests with images will be refused")
    return notes


def _say(console: Console, text: str) -> None:
    """Print text unchanged, long lines unbroken so that they can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
