"""Runs of the load tester in tests: a scripted server, and workloads that ask it for things."""

from __future__ import annotations

import io
import json
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from epd_serve.bench.session import Session
from epd_serve.bench.types import Item, Message, RunSettings


@dataclass(frozen=True)
class Scripted:
    """Where the server is, and what it did, by the id of each request."""

    url: str

    def release(self, name: str) -> None:
        """Let requests for "hold NAME" be answered, from now on at once."""
        urllib.request.urlopen(f"{self.url}/release/{name}").close()

    def log(self) -> dict[str, dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/log") as answer:
            return {one["id"]: one for one in json.load(answer)}


@dataclass(frozen=True)
class Scripts:
    """A workload: one request for each text."""

    texts: Sequence[str]
    name: str = "scripts"

    @property
    def num_items(self) -> int:
        return len(self.texts)

    def items(self, seed: int) -> Iterator[Item]:
        for index, text in enumerate(self.texts):
            yield item(index, text)


def item(index: int, text: str, **more: Any) -> Item:
    message = Message(role="user", parts=(text,))
    return Item(index=index, messages=(message,), max_tokens=8, workload="scripts", **more)


def session() -> Session:
    return Session(console=Console(file=io.StringIO()))


def settings(url: str, arrivals: str = "constant", rate: float | None = 20.0, **more: Any) -> RunSettings:
    defaults: dict[str, Any] = {
        "model": "",
        "workload": "scripts",
        "num_requests": 0,
        "seed": 0,
        "timeout_s": 60.0,
    }
    return RunSettings(base_url=url, arrivals=arrivals, rate=rate, **{**defaults, **more})
