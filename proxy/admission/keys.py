"""API keys: bearer tokens against their hashes, and the limit of each."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256
from typing import ClassVar

from epd_serve.config.gateway import KeyLimits
from epd_serve.config.keys import HASH_PREFIX
from epd_serve.errors import InvalidRequest, Overloaded, ServeError

#: Everybody's name where there are no keys.
ANONYMOUS = "anonymous"


class Client:
    """The holder of an API key, or all callers together where there are no keys.

    Attributes:
        num_active: choices of requests that have entered and not left.
    """

    __slots__ = ("limits", "name", "num_active")

    def __init__(self, name: str, limits: KeyLimits | None = None) -> None:
        self.name = name
        self.limits = limits or KeyLimits()
        self.num_active = 0

    def enter(self) -> None:
        """Count a request in; :meth:`leave` counts it out. Raises Overloaded over the limit."""
        most = self.limits.max_concurrent
        if most is not None and self.num_active >= most:
            raise Overloaded(
                f"this API key has {self.num_active} requests in progress (each choice counts as one), "
                "which is its limit",
                code="rate_limit_exceeded",
            )
        self.num_active += 1

    def widen(self, num_choices: int) -> None:
        """Count a request that entered as ``num_choices``. Raises Overloaded over the key's limit, InvalidRequest
        for a request that exceeds it alone."""
        most = self.limits.max_concurrent
        if most is not None and num_choices > most:
            raise InvalidRequest(
                f"this API key may have {most} choices in progress at once, and this request is for {num_choices}",
                param="n",
            )
        if most is not None and (others := self.num_active - 1) + num_choices > most:
            raise Overloaded(
                f"this API key has {others} requests in progress (each choice counts as one); "
                f"it may have {most}, the {num_choices} of this one included",
                code="rate_limit_exceeded",
            )
        self.num_active += num_choices - 1

    def leave(self, num_choices: int = 1) -> None:
        assert self.num_active >= num_choices
        self.num_active -= num_choices


#: Longer ones are refused unhashed.
MAX_TOKEN_BYTES = 4096
_NOBODY = bytes(32)


class Unauthorized(ServeError):
    status: ClassVar[int] = 401
    type: ClassVar[str] = "authentication_error"
    default_code: ClassVar[str | None] = "invalid_api_key"


class Authenticator:
    """Finds the client that a bearer token belongs to.

    Attributes:
        anonymous: everybody, where there are no keys.
    """

    def __init__(self, keys: Iterable[tuple[str, Client]]) -> None:
        """``keys`` are (hash as of :func:`epd_serve.config.keys.hash_key`, its holder)."""
        self._holders = {bytes.fromhex(text.removeprefix(HASH_PREFIX)): client for text, client in keys}
        self.anonymous = None if self._holders else Client(ANONYMOUS)

    @property
    def clients(self) -> list[Client]:
        return list(self._holders.values()) if self.anonymous is None else [self.anonymous]

    def check(self, authorization: str | bytes | None) -> Client:
        """The client behind the value of the ``Authorization`` header. Raises Unauthorized.

        How long it takes says nothing about the keys: they are looked up by a digest that the caller cannot steer,
        in a table whose own hash is random in each process, and compared in constant time.
        """
        if self.anonymous is not None:
            return self.anonymous
        # Headers as text are handed over as Latin-1, whatever the client's bytes meant.
        header = authorization.encode("latin-1") if isinstance(authorization, str) else authorization or b""
        scheme, _, token = header.partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer" or not token:
            raise Unauthorized("an API key is required: send the header 'Authorization: Bearer <key>'")
        if len(token) <= MAX_TOKEN_BYTES:
            digest = sha256(token).digest()
            holder = self._holders.get(digest)
            if hmac.compare_digest(digest if holder is not None else _NOBODY, digest) and holder is not None:
                return holder
        raise Unauthorized("the API key is none that this gateway knows")
