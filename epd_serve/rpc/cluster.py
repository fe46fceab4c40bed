"""Two processes prove to each other that they have the deployment's ``cluster_key``, once for each connection.

The key never travels::

    caller → server   nonce C, the server that it means
    server → caller   nonce S, HMAC(key, server, reached, C, S)
    caller → server            HMAC(key, client, reached, C, S)

The server proves it first: a peer without the key receives no request. ``reached`` is the :class:`Endpoint` that
the caller means: the service that it expects, and the address at the other end of its socket. A server signs its
own endpoint alone, so a process that forwards a greeting to another server, or to another service, proves nothing.
Links (:mod:`epd_serve.rpc.messages`) and connections for KV and features (:mod:`epd_serve.transfer.tcp`) begin so.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

#: The variable that holds the key, for who is started elsewhere: it shall stand in no list of processes.
CLUSTER_KEY = "EPD_SERVE_CLUSTER_KEY"
_KEY_TEXT = re.compile(r"[!-~]{16,}")

#: Of the text of a nonce and of a proof.
NONCE_BYTES, PROOF_BYTES = 32, 64
_NONCE_TEXT = re.compile(r"[0-9a-f]{32}")


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

    def prove(self, server_nonce: bytes, server_proof: bytes) -> str:
        """The client's proof, once the server's is right. Raises NotProved."""
        nonce = server_nonce.decode("latin-1")
        if _NONCE_TEXT.fullmatch(nonce) is None:
            raise NotProved
        expected = _proof(self._key, "server", self._reached, self.nonce, nonce)
        if not hmac.compare_digest(server_proof, expected.encode()):
            raise NotProved
        return _proof(self._key, "client", self._reached, self.nonce, nonce)


class ServerProof:
    """The server's side of one connection.

    Attributes:
        nonce, proof: its answer to a greeting: that it is the endpoint ``own``.
    """

    __slots__ = ("_expected", "nonce", "proof")

    def __init__(self, key: str, own: Endpoint, client_nonce: str) -> None:
        self.nonce = secrets.token_hex(NONCE_BYTES // 2)
        self.proof = _proof(key, "server", own, client_nonce, self.nonce)
        self._expected = _proof(key, "client", own, client_nonce, self.nonce)

    def check(self, given: bytes) -> bool:
        """Return whether this is the client's proof; a greeting allows one try."""
        expected, self._expected = self._expected, ""
        return bool(expected) and hmac.compare_digest(given, expected.encode())
