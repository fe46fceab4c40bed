"""The calls that ask an instance how it is: health, info, integrity, metrics."""

from __future__ import annotations

from typing import Protocol

import msgspec

from epd_serve.errors import ServeError
from epd_serve.instance.http import JSON, Handler, Reply
from epd_serve.instance.metrics import CONTENT_TYPE
from epd_serve.protocol import wire


class Subject(Protocol):
    """Of :class:`~epd_serve.instance.instance.Instance`."""

    def check_ready(self) -> None: ...

    def info(self) -> wire.InstanceInfo: ...

    def check_integrity(self) -> None: ...

    def in_use(self) -> dict[str, int]: ...

    def render_metrics(self) -> bytes: ...

    async def probe(self, timeout_s: float) -> None: ...


class StatusCalls:
    """See the table in :mod:`epd_serve.protocol.wire`."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [
            ("GET", "/health", self._health),
            ("GET", "/info", self._info),
            ("GET", "/integrity", self._integrity),
            ("GET", "/metrics", self._metrics),
            ("POST", "/probe", self._probe),
        ]

    async def _health(self, body: bytes) -> Reply:
        self._subject.check_ready()
        return Reply(headers=(JSON,), body=b'{"status":"ok"}')

    async def _info(self, body: bytes) -> Reply:
        return Reply(headers=(JSON,), body=wire.to_json(self._subject.info()))

    async def _integrity(self, body: bytes) -> Reply:
        """Check every cache's books; the answer lists what is in use, all zero on an idle instance."""
        self._subject.check_ready()
        try:
            self._subject.check_integrity()
        except AssertionError as error:
            raise ServeError(f"the books do not balance: {error}", code="integrity") from error
        return Reply(headers=(JSON,), body=msgspec.json.encode(self._subject.in_use()))

    async def _probe(self, body: bytes) -> Reply:
        """Compute something; 500 where that does not come to pass."""
        self._subject.check_ready()
        await self._subject.probe(wire.decode(body, wire.ProbeRequest).timeout_s)
        return Reply(status=204)

    async def _metrics(self, body: bytes) -> Reply:
        self._subject.check_ready()
        headers = ((b"content-type", CONTENT_TYPE.encode()),)
        return Reply(headers=headers, body=self._subject.render_metrics())
