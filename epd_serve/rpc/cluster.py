"""Two processes prove to each other that they have the deployment's ``cluster_key``, once for each connection.

The key never travels. Over HTTP::

    POST /cluster/hello     x-epd-nonce: C   x-epd-reached: instance 10.0.0.3:9000
    204                     x-epd-nonce: S   x-epd-proof: HMAC(key, server, reached, C, S)
    the next request        ...              x-epd-proof: HMAC(key, client, reached, C, S)

The server proves it first: a peer without the key receives no request. ``reached`` is the :class:`Endpoint` that
the client means: the service that it expects, and the address at the other end of its socket. A server signs its
own endpoint alone, so a process that forwards a greeting to another server, or to another service, proves nothing.
Connections for KV and features (:mod:`epd_serve.transfer.tcp`) begin with the same proofs.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: The variable that holds the key, for who is started elsewhere: it shall stand in no list of processes.
CLUSTER_KEY = "EPD_SERVE_CLUSTER_KEY"
_KEY_TEXT = re.compile(r"[!-~]{16,}")

HELLO = "/cluster/hello"
#: Of the text of a nonce and of a proof.
NONCE_BYTES, PROOF_BYTES = 32, 64
_NONCE, _REACHED, _PROOF = "x-epd-nonce", "x-epd-reached", "x-epd-proof"
_NONCE_TEXT = re.compile(r"[0-9a-f]{32}")
_REACHED_TEXT = re.compile(r"[a-z]{1,16} [0-9A-Za-z.:%\[\]-]{1,128}")
#: Where uvicorn's protocols keep the :class:`Link` of a connection, for the requests that come on it.
_LINK = "cluster_link"


def check_cluster_key(key: str, where: str) -> str:
    """Raises ValueError for what no header can hold, or anybody can guess; ``where`` it was read."""
    if not _KEY_TEXT.fullmatch(key):
        raise ValueError(f"{where} is no key; write 16 printable ASCII characters at least, without blanks")
    return key


def cluster_key() -> str | None:
    """Return the key that instances ask of their callers and send to others; None: none. Raises ValueError."""
    key = os.environ.get(CLUSTER_KEY, "").strip()
    return check_cluster_key(key, f"the environment variable {CLUSTER_KEY}") if key else None


#: The services of a deployment that prove the cluster's key.
Service = Literal["instance", "admin", "data"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The service and the address of the server for which a proof is valid."""

    service: Service
    address: str

    def __str__(self) -> str:
        return f"{self.service} {self.address}"


def _proof(
    key: str, side: Literal["server", "client"], reached: Endpoint, client_nonce: str, server_nonce: str
) -> str:
    text = f"epd-serve 2\n{side}\n{reached}\n{client_nonce}\n{server_nonce}"
    return hmac.new(key.encode(), text.encode(), sha256).hexdigest()


def address_text(host: str, port: int) -> str:
    """One spelling for each address: ``10.0.0.3:9000``, ``[fe80::1]:9000``."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


class NotProved(Exception):
    """The other side has no key, or another one."""


class Greeting:
    """The client's side of one connection."""

    def __init__(self, key: str, reached: Endpoint) -> None:
        """``reached``: the server that the client means, its address as :func:`address_text` spells it."""
        self._key = key
        self._reached = reached
        self.nonce = secrets.token_hex(NONCE_BYTES // 2)

    @property
    def headers(self) -> str:
        """The headers of the hello: lines that end with CR LF."""
        return f"{_NONCE}: {self.nonce}\r\n{_REACHED}: {self._reached}\r\n"

    def answer(self, headers: Mapping[bytes, bytes]) -> bytes:
        """The line that the next request has, once the server's headers prove that it has the key.

        Raises NotProved.
        """
        proof = self.prove(headers.get(_NONCE.encode(), b""), headers.get(_PROOF.encode(), b""))
        return f"{_PROOF}: {proof}\r\n".encode()

    def prove(self, server_nonce: bytes, server_proof: bytes) -> str:
        """The client's proof, once the server's is right. Raises NotProved."""
        nonce = server_nonce.decode("latin-1")
        if _NONCE_TEXT.fullmatch(nonce) is None:
            raise NotProved
        expected = _proof(self._key, "server", self._reached, self.nonce, nonce)
        if not hmac.compare_digest(server_proof, expected.encode()):
            raise NotProved
        return _proof(self._key, "client", self._reached, self.nonce, nonce)


class Link:
    """The server's side of one connection.

    Attributes:
        proved: whether the client has proved that it has the key.
    """

    __slots__ = ("_expected", "proved")

    def __init__(self) -> None:
        self._expected = ""
        self.proved = False

    def greeted(self, key: str, own: Endpoint, client_nonce: str) -> tuple[str, str]:
        """Return the server's nonce and its proof to be ``own``, the answer to a greeting."""
        nonce = secrets.token_hex(NONCE_BYTES // 2)
        self._expected = _proof(key, "client", own, client_nonce, nonce)
        return nonce, _proof(key, "server", own, client_nonce, nonce)

    def prove(self, given: bytes) -> bool:
        """Check the client's proof; each greeting allows one try."""
        expected, self._expected = self._expected, ""
        self.proved = bool(expected) and hmac.compare_digest(given, expected.encode())
        return self.proved


def with_link(app_state: Mapping[str, Any]) -> dict[str, Any]:
    """The state that one of uvicorn's protocols hands on with each request of its connection."""
    return {**app_state, _LINK: Link()}


def is_proved(scope: Scope) -> bool:
    """Whether the client of a request has the key, on a server behind :class:`ClusterLinks`."""
    link = scope.get("state", {}).get(_LINK)
    return link is not None and link.proved


class ClusterLinks:
    """ASGI: answers greetings and checks proofs; ``app`` decides what a client without a proof may do.

    Needs a protocol that keeps a link for each connection (:func:`with_link`).
    """

    def __init__(self, app: Any, key: str, service: Service, own_address: Callable[[], str]) -> None:
        """``own_address``: the address that the server tells others; it is also reached at that of its socket."""
        self._app = app
        self._key = key
        self._service = service
        self._own_address = own_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] != HELLO and is_proved(scope)):
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        if scope["path"] == HELLO:
            await self._greet(scope, {name.decode(): value.decode("latin-1") for name, value in headers}, send)
            return
        given = [value for name, value in headers if name == _PROOF.encode()]
        if given and not (len(given) == 1 and scope["state"][_LINK].prove(given[0])):
            await _answer(send, 401, "this is no proof of the deployment's cluster_key")
            return
        await self._app(scope, receive, send)

    async def _greet(self, scope: Scope, headers: Mapping[str, str], send: Send) -> None:
        nonce, reached = headers.get(_NONCE, ""), headers.get(_REACHED, "")
        if _NONCE_TEXT.fullmatch(nonce) is None or _REACHED_TEXT.fullmatch(reached) is None:
            await _answer(
                send, 400, f"a greeting has {_NONCE}, 32 hex digits, and {_REACHED}, a service and its address"
            )
            return
        addresses = {address_text(*scope["server"]), self._own_address()}
        own = next((one for at in addresses if str(one := Endpoint(self._service, at)) == reached), None)
        if own is None:
            names = " or ".join(sorted(addresses))
            await _answer(
                send, 421, f"this is {self._service} {names}, reached as {reached}: something lies in between"
            )
            return
        server_nonce, proof = scope["state"][_LINK].greeted(self._key, own, nonce)
        found = [(_NONCE.encode(), server_nonce.encode()), (_PROOF.encode(), proof.encode())]
        await send({"type": "http.response.start", "status": 204, "headers": found})
        await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, status: int, message: str) -> None:
    error = {"message": message, "type": "authentication_error", "param": None, "code": None}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
