"""Shared by the benchmarks: options, result files, slower devices, chats with pictures, workers that answer over
pipes."""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
from PIL import Image

from epd_serve.cost.profile import Profile
from epd_serve.launch.processes.forking import HEAP_TUNABLES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHAT_PATH = "/v1/chat/completions"


def machine() -> str:
    return f"{platform.machine()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB"


def argument_parser(description: str | None, result: str | None = None) -> argparse.ArgumentParser:
    """A parser; with ``result`` it has --output, by default that file in :data:`RESULTS`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if result is not None:
        parser.add_argument("--output", type=Path, default=RESULTS / result)
    return parser


def typed(module: str) -> str:
    """The command as it was typed."""
    return f"python -m benchmarks.{module} {shlex.join(sys.argv[1:])}".strip()


def write(path: Path, content: object) -> str:
    """Write a result file, whole at any time; return its text."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)
    return text


def host_busy() -> float:
    """The share of the cores that were busy since the last call, without what ran at a lower priority."""
    times = psutil.cpu_times_percent()
    return (times.user + times.system) / 100


def slowed(profile: Profile, slowness: float) -> Profile:
    """The profile of a device that takes ``slowness`` times as long for everything."""

    def slower(line: Any) -> Any:
        seconds = {name: getattr(line, name) * slowness for name in line.__struct_fields__ if name.endswith("_s")}
        return msgspec.structs.replace(line, **seconds)

    return msgspec.structs.replace(
        profile,
        step=tuple(map(slower, profile.step)),
        encode=tuple(map(slower, profile.encode)),
        link_bytes_per_s=profile.link_bytes_per_s / slowness,
        handshake_s=profile.handshake_s * slowness,
    )


def encoded(image: Image.Image, form: str = "PNG", **more: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **more)
    return buffer.getvalue()


def data_url(data: bytes, form: str = "png") -> str:
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}"


def user_message(text: str, urls: Sequence[str] = ()) -> dict[str, Any]:
    """A message of a chat with pictures before its text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def greedy_chat(text: str, urls: Sequence[str] = (), *, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A chat whose answer is always the same and as long as it may be."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return {"messages": [user_message(text, urls)], **sampling, **fields}


class Worker:
    """An engine's process, which reads cases as lines of JSON and answers with their times.

    Attributes:
        failure: the reason why it runs no more cases.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name = name
        self.failure: str | None = None
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {"GLIBC_TUNABLES": HEAP_TUNABLES, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment | {"OMP_NUM_THREADS": str(threads)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._answer()

    def ask(self, **case: Any) -> dict[str, Any] | None:
        """Times of a case; None where the engine has failed."""
        if self.failure is not None:
            return None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        with self._process:  # closes its pipes, which ends it, and waits
            pass
        self._log.close()

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # others are what libraries print
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        self.failure = lines[-1][:200] if lines else "it ended without a word"
        print(f"{self.name} takes no part: {self.failure}", flush=True)
        return None
