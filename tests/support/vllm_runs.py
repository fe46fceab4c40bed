"""Real vLLM processes: a monolithic server alone, and whole deployments as ``epd-serve up`` runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from chat import chat, data_url, stream_events
from clips import clip
from http_client import is_up
from metrics import metric_sums
from own_ports import free_port
from pictures import noise
from prometheus_client.parser import text_string_to_metric_families

from epd_serve.backends.vllm_command import VllmOptions, command_of, environment_of
from epd_serve.types import Role

READY_TIMEOUT_S = 1200
MAX_TOKENS = 8
MODEL = "tested"
#: vLLM would join a picture and a text with a line feed where it does not see that the template takes parts.
FLAGS = {"enforce_eager": True, "chat_template_content_format": "openai"}

#: An answer: its tokens, each with its log-probability.
Tokens = list[tuple[str, float]]


def engine_python() -> str | None:
    """The Python with vLLM that tests are to use; None where there is none."""
    named = os.environ.get("EPD_SERVE_VLLM_PYTHON", sys.executable)
    script = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        return named if subprocess.run([named, "-I", "-c", script], timeout=300).returncode == 0 else None
    except OSError:
        return None


def questions() -> list[dict[str, Any]]:
    """Ten with pictures, of which two have two and two are made smaller; two with videos; eight without.

    The pictures need not be resized: pixels of engines that do it differently differ by rounding.
    """
    pictures = [
        noise(seed, size) for seed, size in ((1, (112, 84)), (2, (56, 140)), (3, (84, 84)), (4, (140, 56)))
    ]
    asked = [chat("What is this?", picture) for picture in pictures]
    asked += [
        chat("Compare them.", pictures[0], pictures[1]),
        chat("Compare them.", pictures[1], pictures[0]),
        chat("What color is it? " * 12, pictures[2]),
        chat("Where is it?", noise(5, (112, 112))),
    ]
    asked += [chat(text) for text in ("Say apple", "What is 2 + 3?", "Hello", "Repeat: " + "apple banana " * 60)]
    asked += [chat(f"Count to {number}. " * number) for number in (3, 7, 19, 31)]
    bounds = {"mm_processor_kwargs": {"max_pixels": 84 * 84, "min_pixels": 28 * 28}}
    asked += [{**chat("What is this?", picture), **bounds} for picture in pictures[:2]]
    asked += [chat_with_video("What happens?"), chat_with_video("What happens?", num_frames=4)]
    fields = {
        "model": MODEL,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        "skip_special_tokens": False,
    }
    return [{**one, **fields} for one in asked]


def chat_with_video(text: str, **options: int) -> dict[str, Any]:
    """A question about a clip of eight frames, of which ``options`` choose some."""
    url = data_url(clip(seed=3, count=8, size=(56, 56)), "video/mp4")
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": text}]
    options_of_media = {"media_io_kwargs": {"video": options}} if options else {}
    return {**chat(text), "messages": [{"role": "user", "content": parts}], **options_of_media}


def ask(url: str, body: Mapping[str, Any], *, stream: bool = False, timeout_s: float = 300) -> Tokens:
    """Raises httpx.HTTPStatusError for an error."""
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as client:
        if not stream:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return tokens_of(answer.json()["choices"][0]["logprobs"])
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            return streamed_tokens(answer.iter_lines())


def streamed_tokens(events: Iterable[str]) -> Tokens:
    """The text of all events of an answer."""
    choices = [event["choices"][0] for event in stream_events("\n".join(events))]
    return [token for choice in choices for token in tokens_of(choice.get("logprobs"))]


def tokens_of(logprobs: dict[str, Any] | None) -> Tokens:
    return [(one["token"], round(one["logprob"], 3)) for one in (logprobs or {"content": []})["content"]]


def same(left: Tokens, right: Tokens) -> bool:
    """The same tokens, and log-probabilities that differ by rounding alone."""
    return [t for t, _ in left] == [t for t, _ in right] and all(
        abs(a - b) < 0.01 for (_, a), (_, b) in zip(left, right, strict=True)
    )


def ask_all(url: str, bodies: list[dict[str, Any]], *, stream: bool = False) -> list[Tokens]:
    """Four at a time."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda body: ask(url, body, stream=stream), bodies))


def check_all(url: str, bodies: list[dict[str, Any]], expected: list[Tokens], *, stream: bool = False) -> None:
    answers = ask_all(url, bodies, stream=stream)
    wrong = [pair for pair in zip(answers, expected, strict=True) if not same(*pair)]
    assert not wrong, wrong


def figures(url: str) -> dict[str, float]:
    """vLLM's metrics, by name and by source or event where they have one."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text
    return metric_sums(text, "vllm:", "source", "event")


@contextmanager
def monolith(python: str, model: Path, log: Path) -> Iterator[str]:
    """``vllm serve`` with all stages in one process, without anything of ours; yields its URL."""
    options = VllmOptions(
        name="epd0",
        role=Role.parse("EPD"),
        python=python,
        model=str(model),
        served_model_name=MODEL,
        host="127.0.0.1",
        port=free_port("127.0.0.1"),
        kind="cpu",
        dtype="float32",
        kv_bytes=1 << 30,
        arguments={"max_model_len": 1024, "max_num_seqs": 16, "trust_request_mm_kwargs": True, **FLAGS},
    )
    url = f"http://127.0.0.1:{options.port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command_of(options),
            env={**os.environ, "PYTHONPATH": "", **environment_of(options)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_up(f"{url}/health"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Deployment:
    """A running ``epd-serve up``.

    Attributes:
        urls: of the instances, by name.
    """

    url: str
    urls: dict[str, str]
    admin: str
    logs: Path
    process: subprocess.Popen[str]

    def drain(self, name: str, on: bool = True) -> None:
        """The gateway gives it nothing new."""
        path = f"/admin/instances/{name}/{'drain' if on else 'undrain'}"
        assert httpx.post(self.admin + path, trust_env=False, timeout=60).status_code == 200

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to an instance's processes but Python's resource tracker, which removes shared memory."""
        leader = psutil.Process(self.pid(name))
        processes = [leader, *leader.children(recursive=True)]
        trackers = [one for one in processes if any("resource_tracker" in part for part in one.cmdline())]
        for process in processes:
            if process not in trackers:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def pid(self, name: str) -> int:
        port = self.urls[name].rpartition(":")[2]
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            if "serve" in command and command[command.index("--port") + 1] == port:
                return child.pid
        raise AssertionError(f"{name} does not run")

    def is_ready(self, name: str) -> bool:
        """Whether the gateway sends work to it."""
        told = httpx.get(f"{self.url}/health", trust_env=False, timeout=60).json()["instances"]
        return bool(told[name]["ready"])

    def wait_until(self, condition: Any, what: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {self.tail()}"
            time.sleep(0.1)

    def check_idle(self, name: str) -> None:
        """No request and no block is left."""

        def is_idle() -> bool:
            now = figures(self.urls[name])
            return not any(
                now[key] for key in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            )

        self.wait_until(is_idle, f"{name} is idle", 300)

    def encodes_in_flight(self) -> float:
        """Pictures that the gateway has sent to an E that has not answered."""
        return self.gateway_figure("in_flight_calls", stage="E")

    def gateway_figure(self, name: str, **labels: str) -> float:
        """The sum of the gateway's metrics whose name ends so."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=60).text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return sum(
            one.value for one in samples if one.name.endswith(name) and labels.items() <= one.labels.items()
        )

    def tail(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.logs.glob("*.log")))


@contextmanager
def up(python: str, topology: str, model: Path, folder: Path, **settings: Any) -> Iterator[Deployment]:
    """A deployment on this machine's CPU."""
    config = {
        "topology": topology,
        "engine": "vllm",
        "model": str(model),
        "served_model_name": MODEL,
        "dtype": "float32",
        "gateway": {"port": 0, "admin": {"port": free_port("127.0.0.1")}, "probe_timeout_s": 300},
        **settings,
        "vllm": {"python": python, **settings.get("vllm", {})},
        "instances": {
            "base_port": 0,
            "threads": 1,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "engine_args": FLAGS,
        },
    }
    file = folder / "deployment.yaml"
    file.write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "epd_serve.cli", "up", str(file)],
        stdout=subprocess.PIPE,  # what comes later is little, and fits
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "NO_COLOR": "1"},
    )
    try:
        yield _ready(process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _ready(process: subprocess.Popen[str]) -> Deployment:
    assert process.stdout is not None
    timer = threading.Timer(READY_TIMEOUT_S, process.kill)
    timer.start()
    output = ""
    for line in process.stdout:
        output += line
        if found := re.search(r"Ready: (\S+)/v1 serves [^\0]*^Logs: (\S+)$", output, re.MULTILINE):
            timer.cancel()
            logs = Path(found[2])
            told = (arg for arg in psutil.Process(process.pid).children() if "proxy" in arg.cmdline())
            command = next(told).cmdline()
            gateway = json.loads(Path(command[command.index("--config") + 1]).read_text())["gateway"]
            admin = f"http://127.0.0.1:{gateway['admin']['port']}"
            return Deployment(found[1], gateway["instances"], admin, logs, process)
    timer.cancel()
    raise AssertionError(f"it ended: {output}")
