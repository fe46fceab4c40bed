"""``epd-serve up``: run a deployment in the foreground until Ctrl-C; what dies is started again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from PIL import Image, ImageDraw
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from epd_serve.config import DEMO_MODEL, DeploymentConfig, ShapeConfig, model_path
from epd_serve.config.model_files import chat_template, read_model_config
from epd_serve.cost.shape import shape_of
from epd_serve.launch.commands import mps_note
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessState
from epd_serve.models.families import TEXT

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_up(
    config: DeploymentConfig,
    console: Console,
    engine_reason: str = "",
    layout_reason: str = "",
    file: Path | None = None,
) -> int:
    """Start, show progress, say what to type next, and stay until a signal or a death.

    Returns the exit code: 0 after a signal, 1 when a process died for good. A second signal ends everything at
    once. Raises ValueError where a port is taken or the model is not there.
    """
    if layout_reason:
        _say(console, layout_reason)
    if engine_reason:
        _say(console, f"engine: {config.engine} ({engine_reason})")
    for note in _notes(config):
        _say(console, f"note: {note}")
    stop = asyncio.Event()
    with Progress(console) as progress:
        deployment = LocalDeployment(
            config,
            file=file,
            keep_logs=True,
            on_change=progress.update,
            on_death=lambda death, delay_s: _say(console, _restart_text(death, delay_s)),
        )
        with _handled(_SIGNALS, lambda: deployment.kill() if stop.is_set() else stop.set()):
            try:
                await _until(stop, _ready(deployment))
                progress.close()
                if not stop.is_set():
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
    return f"{death.end}. Starting it again in {delay_s:g} s; its log is {death.log_file}"


def _ready_text(deployment: LocalDeployment) -> str:
    config, url = deployment.config, deployment.gateway_url
    images = not _is_text_model(config)
    picture = deployment.admin_socket.with_name("picture.png")
    questions = Questions(picture=drawn(picture) if images else None)
    if config.model == DEMO_MODEL:  # what it can answer
        questions = replace(
            questions, text="What is the capital of France?", about_picture="What color is the circle?"
        )
    steps = next_steps(url, config.model_name, questions, needs_key=config.gateway.needs_key)
    dashboard = f"Dashboard: {url}/dashboard\n" if config.gateway.dashboard else ""
    return (
        f"\nReady: {url}/v1 serves model {config.model_name!r} as {config.topology}. Ctrl-C stops.\n"
        f"{dashboard}Logs: {deployment.log_dir}\n\n{steps}\n"
    )


def _is_text_model(config: DeploymentConfig) -> bool:
    if isinstance(config.model, ShapeConfig):
        return shape_of(config.model.shape_of).vision is None
    return config.engine != "vllm" and read_model_config(model_path(config.model)).get("model_type") in TEXT


def _notes(config: DeploymentConfig) -> list[str]:
    """Notes on parts of the deployment that have no effect, and on requests that it cannot serve."""
    placement = config.placement()
    used = {device for instance in placement for device in instance.devices}
    notes = [f"device {device} stays unused" for device in config.devices if device not in used]
    roles = {str(instance.role) for instance in placement}
    notes += [f"roles.{role} has no effect: no instance has it" for role in config.roles if role not in roles]
    if isinstance(config.model, ShapeConfig):
        notes.append("the model has no weights: answers are made of hashes, times are those of emulated devices")
    if note_on_mps := mps_note(config, os.environ):
        notes.append(note_on_mps)
    if (
        isinstance(config.model, str)
        and config.model != DEMO_MODEL
        and not chat_template(model_path(config.model))
    ):
        notes.append("the model has no chat template: chats will be refused, /v1/completions works")
    return notes


def _say(console: Console, text: str) -> None:
    """Print text unchanged, long lines unbroken so that they can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


logger = logging.getLogger(__name__)

_PLACEHOLDER = "PICTURE"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions in the commands: one in words, and one about a PNG file; None: no picture is asked about."""

    text: str = "How many legs do two spiders have?"
    about_picture: str = "What is in the picture?"
    picture: str | None = None


def drawn(picture: Path) -> str | None:
    """The name of a PNG file with a red circle and a blue square; None where it cannot be written."""
    image = Image.new("RGB", (320, 240), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((40, 60, 140, 160), fill="red")
    draw.rectangle((190, 80, 280, 170), fill="blue")
    try:
        image.save(picture)
    except OSError as error:  # a disk that is full
        logger.warning("%s cannot be written: %s", picture, error.strerror or error)
        return None
    return str(picture)


def next_steps(base_url: str, model: str, questions: Questions, *, needs_key: bool) -> str:
    """Commands to paste: a question in words, one about a picture, a chat, and a whole program in Python.

    Args:
        base_url: of the gateway, without ``/v1``.
        needs_key: whether clients must send the API key; the commands then take it from ``$API_KEY``.
    """
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    curl = f"curl -s {base_url}/v1/chat/completions -H 'Content-Type: application/json'{key}"
    steps = ["Ask in words:", f"{curl} -d {_quoted(_body(model, questions.text))}"]
    image = ""
    if questions.picture is not None:
        content = [
            {"type": "text", "text": questions.about_picture},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PLACEHOLDER}"}},
        ]
        before, after = _quoted(_body(model, content)).split(_PLACEHOLDER)
        picture = f"""'"$(base64 -w0 {questions.picture})"'"""
        # echo and a pipe, since a picture can be longer than an argument of a program may be
        steps += ["Ask about a picture:", f"echo {before}{picture}{after} | {curl} -d @-"]
        image = f" --image {questions.picture}"
    own_key = 'OPENAI_API_KEY="$API_KEY" ' if needs_key else ""
    steps += ["Chat in the terminal:", f"{own_key}epd-serve chat --base-url {base_url}{image}"]
    text = "\n".join(step if step.endswith(":") else f"  {step}\n" for step in steps)
    return (
        f"{text}\nFrom Python (pip install openai):\n\n{_program(base_url, model, questions, needs_key=needs_key)}"
    )


def _program(base_url: str, model: str, questions: Questions, *, needs_key: bool) -> str:
    content, read = f"{questions.text!r}", ""
    if questions.picture is not None:
        read = f"picture = base64.b64encode(open({questions.picture!r}, 'rb').read()).decode()\n"
        content = (
            f"[{{'type': 'text', 'text': {questions.about_picture!r}}}, "
            "{'type': 'image_url', 'image_url': {'url': f'data:image/png;base64,{picture}'}}]"
        )
    modules = [*(["base64"] if read else []), *(["os"] if needs_key else []), "openai"]
    api_key = "os.environ['API_KEY']" if needs_key else "'-'"
    return (
        f"import {', '.join(modules)}\n"
        f"client = openai.OpenAI(base_url='{base_url}/v1', api_key={api_key})\n"
        f"{read}content = {content}\n"
        "messages = [{'role': 'user', 'content': content}]\n"
        f"answer = client.chat.completions.create(model={model!r}, messages=messages)\n"
        "print(answer.choices[0].message.content)"
    )


def _body(model: str, content: object) -> str:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """``text`` as one word of a POSIX shell."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


_STYLES = {
    ProcessState.STARTING: "yellow",
    ProcessState.LOADING: "yellow",
    ProcessState.READY: "green",
    ProcessState.STOPPING: "yellow",
    ProcessState.STOPPED: "dim",
    ProcessState.DIED: "bold red",
    ProcessState.WAITING: "bold red",
}
_BUSY = (ProcessState.STARTING, ProcessState.LOADING, ProcessState.STOPPING)


class Terminal(Console):
    """The console for a deployment's output; it falls silent when its reader ends (``epd-serve up | head``)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


class Progress:
    """A live table on a terminal; elsewhere one plain line for each change of a process's state.

    Give :meth:`update` to the deployment as its ``on_change``. As a context manager it shows the table until
    :meth:`close` or its end.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._processes: dict[str, ManagedProcess] = {}
        self._closed = False
        self._live = (
            Live(get_renderable=self._table, console=console, refresh_per_second=8)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the table as it stands; what is printed from now on comes below it.

        On a terminal that is, from now on, one line for each process that was started again.
        """
        if self._live:
            self._live.stop()
        self._closed = True

    def update(self, process: ManagedProcess) -> None:
        """Show the state that ``process`` has now."""
        self._processes[process.spec.name] = process
        is_back = self._closed and process.num_restarts > 0 and process.state is ProcessState.READY
        if self._live is None or is_back:
            label = f" ({process.spec.label})" if process.state is ProcessState.STARTING else ""
            line = f"{process.spec.name:<8} {process.state}{label}, {process.elapsed_s:.1f} s"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        return progress_table(list(self._processes.values()))


def progress_table(processes: Sequence[ManagedProcess]) -> Table:
    """Name, purpose, state and seconds of each process."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column()
    table.add_column(justify="right")
    for process in processes:
        style = _STYLES[process.state]
        state = Spinner("dots", Text(process.state, style), style=style) if process.state in _BUSY else None
        table.add_row(
            Text(process.spec.name, "bold"),
            Text(process.spec.label, "dim"),
            state or Text(f"● {process.state}", style),
            f"{process.elapsed_s:.1f} s",
        )
    return table
