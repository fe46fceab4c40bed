"""The role that each instance of a running deployment reports, as long as it is watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress

import httpx

from benchmarks.elastic.plots import DRAINING, REBUILDING, Span

_LOOK_S = 0.25
_STATES = {"DRAINING": DRAINING, "REBUILDING": REBUILDING}


class Watcher:
    """Looks four times a second. Times are seconds since it was made."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls
        self._began = time.monotonic()
        self._last: dict[str, tuple[str, float]] = {}
        self._spans: list[Span] = []

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._watch(client, name, url)) for name, url in self._urls.items()]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _watch(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        while True:
            with suppress(httpx.HTTPError):
                info = (await client.get(f"{url}/info")).json()
                self.note(name, _STATES.get(info["state"], info["role"]), time.monotonic() - self._began)
            await asyncio.sleep(_LOOK_S)

    def note(self, name: str, state: str, now_s: float) -> None:
        """``state``: a role, or what plots call the way to another."""
        before, since_s = self._last.get(name, (None, 0.0))
        if state == before:
            return
        if before is not None:
            self._spans.append((name, before, since_s, now_s))
        self._last[name] = state, now_s

    def spans(self, until_s: float) -> list[Span]:
        """All that lie before, the last one of each instance up to there."""
        open_ones = ((name, state, since_s, until_s) for name, (state, since_s) in self._last.items())
        return [
            (name, state, since_s, min(end_s, until_s))
            for name, state, since_s, end_s in (*self._spans, *open_ones)
            if since_s < until_s
        ]

    def layout(self) -> str:
        """The roles of now."""
        return layout_of(state for state, _ in self._last.values())


def layout_of(roles: Iterable[str]) -> str:
    """As in 2E1P5D."""
    known = list(roles)
    return "".join(f"{known.count(role)}{role}" for role in ("E", "P", "D") if role in known)
