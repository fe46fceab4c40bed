"""Authentication: bearer tokens against the hashes of API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256
from typing import ClassVar

from epd_serve.config.keys import HASH_PREFIX
from epd_serve.errors import ServeError
from proxy.admission.limits import Client

#: Longer ones are refused unhashed.
MAX_TOKEN_BYTES = 4096
_NOBODY = bytes(32)
#: Everybody's name where there are no keys.
ANONYMOUS = "anonymous"


class Unauthorized(ServeError):
    status: ClassVar[int] = 401
    type: ClassVar[str] = "authentication_error"
    default_code: ClassVar[str | None] = "invalid_api_key"


class Authenticator:
    """Finds the client that a bearer token belongs to; without any key everybody is let in as ANONYMOUS."""

    def __init__(self, keys: Iterable[tuple[str, Client]]) -> None:
        """``keys`` are (hash as of :func:`epd_serve.config.keys.hash_key`, its holder)."""
        self._holders: dict[bytes, Client] = {}
        self._anonymous: Client | None = None
        self.replace(keys)

    def replace(self, keys: Iterable[tuple[str, Client]]) -> None:
        """From now on these are the keys. Whose name and limits stay is counted on; requests in progress go on."""
        before, self._holders = self._holders, {}
        for text, client in keys:
            digest = bytes.fromhex(text.removeprefix(HASH_PREFIX))
            known = before.get(digest)
            same = known is not None and (known.name, known.limits) == (client.name, client.limits)
            self._holders[digest] = known if known is not None and same else client
        self._anonymous = None if self._holders else self._anonymous or Client(ANONYMOUS)

    @property
    def is_open(self) -> bool:
        """Whether there are no keys."""
        return self._anonymous is not None

    @property
    def clients(self) -> list[Client]:
        return list(self._holders.values()) if self._anonymous is None else [self._anonymous]

    def check(self, authorization: str | bytes | None) -> Client:
        """The client behind the value of the ``Authorization`` header. Raises Unauthorized.

        How long it takes says nothing about the keys: they are looked up by a digest that the caller cannot steer,
        in a table whose own hash is random in each process, and compared in constant time.
        """
        if self._anonymous is not None:
            return self._anonymous
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
