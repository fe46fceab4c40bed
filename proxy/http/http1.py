"""HTTP/1.1 as the gateway speaks it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httptools

from epd_serve.config import GatewayConfig
from epd_serve.rpc.bounded import BoundedHttp
from proxy.http.arrival import ArrivalLimits

#: The plainest request with a body: its beginning; its head, with path and header lines.
PLAIN_START = b"POST /"
PLAIN_HEAD = re.compile(
    rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n)+)\r\n"
)


def arrival_limits(app: Any) -> ArrivalLimits:
    """Return the limits of an application that has some, at ``app.state.arrival``."""
    limits = getattr(getattr(app, "state", None), "arrival", None)
    return limits if isinstance(limits, ArrivalLimits) else ArrivalLimits.of(GatewayConfig())


def head_problem(version: str, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Say why a request's head is refused: two servers could read it in two ways (RFC 9112, sections 2.3, 3.2,
    6.1 and 7.4; RFC 9110, section 11.6.2). ``headers`` have their names in lower case."""
    if version not in ("1.0", "1.1"):
        return "HTTP/1.1 and HTTP/1.0 are spoken here."
    number = Counter(name for name, _ in headers)
    if number[b"host"] != 1 and (number[b"host"] or version == "1.1"):
        return "A request needs exactly one Host header."
    if number[b"authorization"] > 1:
        return "A request may have one Authorization header."
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]):
        return "A body may be chunked, and have no other transfer coding."
    if any(b"chunked" in value.lower() for name, value in headers if name == b"te"):
        return "The header TE must not name chunked, which is meant where it says Transfer-Encoding."
    return None


class StrictHttp(BoundedHttp):
    """Refuses what two servers can read in two ways, and takes no offer of another protocol."""

    _problem: str | None = None

    @property
    def header_s(self) -> float:
        return arrival_limits(self.config.app).header_s

    def data_received(self, data: bytes) -> None:
        self._unread = data
        while self._unread:
            self._data, self._unread = self._unread, b""
            super().data_received(self._data)

    def on_headers_complete(self) -> None:
        self._problem = head_problem(self.parser.get_http_version(), self.headers)
        if self._problem is not None:
            raise ValueError(self._problem)  # the parser stops, and uvicorn answers with a 400
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent all of its request, and no more to come, gets its answer."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.pipeline:
            return False
        if self.scope.get("http_version") != "1.1":  # it may not be sent an interim answer
            return False
        cycle.keep_alive = False
        HalfClosed(self.loop, self.transport, lambda: cycle.response_started)
        return True

    def _should_upgrade(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Have the request read again without the offer of another protocol, which the parser takes as accepted.

        It is ignored: what is behind the head is the request's body (RFC 9110, section 7.8).
        """
        method, offered = self.parser.get_method(), sys.exception()
        assert isinstance(offered, httptools.HttpParserUpgrade)
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not spoken here.")
            return
        head = [b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() != b"upgrade")
            if name != b"upgrade":
                head.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._collected_bytes = 0
        self._unread = b"".join((*head, b"\r\n", self._data[offered.args[0] :]))

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._problem or msg)


class HalfClosed:
    """A connection whose client has sent its last: it waits for its answer, or is gone.

    That is only seen where something is sent to it. An interim answer, which every client must be able to read
    (RFC 9110, section 15.2), does so until the answer itself begins.
    """

    _INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
    _SOON_S, _LATER_S = 0.1, 1.0

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, has_begun: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._has_begun = has_begun
        self._ask(self._SOON_S)

    def _ask(self, next_s: float) -> None:
        if not self._transport.is_closing() and not self._has_begun():
            self._transport.write(self._INTERIM)
            self._loop.call_later(next_s, self._ask, self._LATER_S)


class ReturningHttp(StrictHttp):
    """Gives the connection back to the owner that had it before, where a plain POST begins.

    Attributes:
        give_back: takes the connection, and the data with which that begins.
    """

    give_back: Callable[[bytes], None]
    _made = False
    #: Between two requests.
    _between = True

    def take_over(self, transport: asyncio.Transport) -> None:
        if self._made:
            self.connections.add(self)
        else:
            self._made = True
            self.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if (
            self._between
            and data.startswith(PLAIN_START)
            and (self.cycle is None or self.cycle.response_complete)
            and not self.pipeline
            and not self.flow.write_paused  # that it may write again is told to who has the connection
            and PLAIN_HEAD.match(data) is not None
        ):
            self._unset_keepalive_if_required()
            self.connections.discard(self)
            self._head.stop()
            self.give_back(data)
        else:
            self.feed(data)

    def feed(self, data: bytes) -> None:
        self._between = False
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._between = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._between = True
