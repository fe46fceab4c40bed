"""The greeting in which both ends of a connection prove the deployment's ``cluster_key`` without sending it.

::

    caller → server   nonce C, reached
    server → caller   nonce S, HMAC(key, server, reached, C, S)
    caller → server            HMAC(key, client, reached, C, S)

The server proves the key first: a peer without the key receives no request. ``reached`` is the :class:`Endpoint`
that the caller expects: a service, and the address at the other end of its socket. A server signs only its own
endpoints, so a process that forwards a greeting to another server or service proves nothing. Links
(:mod:`epd_serve.rpc.messages`) and connections for KV and features (:mod:`epd_serve.transfer.tcp`) begin this way.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import msgspec

from epd_serve.errors import ErrorBody, ErrorEnvelope, InstanceUntrusted, error_from_response
from epd_serve.rpc.messages import Error, Hello, Proof, Welcome

#: The environment variable that holds the key, as command lines are visible to other users.
CLUSTER_KEY = "EPD_SERVE_CLUSTER_KEY"
_KEY_TEXT = re.compile(r"[!-~]{16,}")

_NONCE_BYTES = 16
_NONCE_TEXT = re.compile(r"[0-9a-f]{32}")


def check_cluster_key(key: str, where: str) -> str:
    """Return the key. Raises ValueError, naming ``where`` it was read, if it is too short or not plain ASCII."""
    if not _KEY_TEXT.fullmatch(key):
        raise ValueError(f"{where} is not a key; use at least 16 printable ASCII characters without blanks")
    return key


def cluster_key() -> str | None:
    """Return the cluster key of this process's environment, if any. Raises ValueError."""
    key = os.environ.get(CLUSTER_KEY, "").strip()
    return check_cluster_key(key, f"the environment variable {CLUSTER_KEY}") if key else None


#: The services that prove the cluster key.
Service = Literal["instance", "admin", "data"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The service and address that a proof is bound to."""

    service: Service
    address: str

    def __str__(self) -> str:
        return f"{self.service} {self.address}"


def address_text(host: str, port: int) -> str:
    """Return the canonical text of an address: ``10.0.0.3:9000``, ``[fe80::1]:9000``."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


class Refused(Exception):
    """The server refuses the caller; ``message`` tells it why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        envelope = ErrorEnvelope(ErrorBody(message=reason, type="authentication_error"))
        self.message = Error(0, status, msgspec.json.encode(envelope))


class CallerGreeting:
    """The caller's side of a greeting, which begins with ``hello``. ``name`` is the server's in error messages."""

    def __init__(self, key: str | None, reached: Endpoint, name: str) -> None:
        self._key = key
        self._reached = reached
        self._name = name
        self.hello = Hello("", "") if key is None else Hello(secrets.token_hex(_NONCE_BYTES), str(reached))

    def prove(self, answer: Welcome | Error) -> Proof:
        """Check the server's proof and return the caller's.

        Raises InstanceUntrusted, or the server's own error if it refuses the caller's key.
        """
        if isinstance(answer, Error):
            error = error_from_response(answer.status, answer.body, origin=self._name)
            raise error if answer.status == 401 else self._untrusted(error.message)
        if self._key is None:
            return Proof("")
        if _NONCE_TEXT.fullmatch(answer.nonce) is None:
            raise self._untrusted("no nonce")
        server, client = (
            _proof(self._key, side, str(self._reached), self.hello.nonce, answer.nonce)
            for side in ("server", "client")
        )
        if not hmac.compare_digest(answer.proof.encode(), server.encode()):
            raise self._untrusted("another key")
        return Proof(client)

    def _untrusted(self, why: str) -> InstanceUntrusted:
        return InstanceUntrusted(f"{self._name} does not prove that it has this deployment's cluster_key ({why})")


class ServerGreeting:
    """The server's side of a greeting; ``own`` are the endpoints under which callers may reach it."""

    def __init__(self, key: str | None, own: Iterable[Endpoint]) -> None:
        self._key = key
        self._own = {str(one): one.service for one in own}
        self._expected = ""

    def answer(self, hello: Hello) -> Welcome:
        """Return the server's proof. Raises Refused if the caller lacks the key or means another server."""
        if self._key is None:
            return Welcome("", "")
        if not hello.nonce:
            services = " ".join({*self._own.values()})
            raise Refused(401, f"this {services} asks for its deployment's cluster_key: set {CLUSTER_KEY}")
        if hello.reached not in self._own:
            names = " or ".join(sorted(self._own))
            raise Refused(421, f"this is {names}, reached as {hello.reached[:100]}: is there a proxy in between?")
        nonce = secrets.token_hex(_NONCE_BYTES)
        proof, self._expected = (
            _proof(self._key, side, hello.reached, hello.nonce, nonce) for side in ("server", "client")
        )
        return Welcome(nonce, proof)

    def check(self, proof: Proof) -> None:
        """Raise Refused unless the caller's proof is right; a greeting allows one attempt."""
        expected, self._expected = self._expected, ""
        if self._key is None:
            return
        if not expected or not hmac.compare_digest(proof.proof.encode(), expected.encode()):
            raise Refused(401, "the caller does not have the deployment's cluster_key")


def _proof(key: str, side: str, reached: str, caller_nonce: str, server_nonce: str) -> str:
    text = f"epd-serve 2\n{side}\n{reached}\n{caller_nonce}\n{server_nonce}"
    return hmac.new(key.encode(), text.encode(), sha256).hexdigest()
