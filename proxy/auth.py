"""The bearer token that clients must send where the deployment sets ``gateway.api_key``."""

from __future__ import annotations

import hmac
from typing import ClassVar

from epd_serve.errors import ServeError


class Unauthorized(ServeError):
    status: ClassVar[int] = 401
    type: ClassVar[str] = "authentication_error"
    default_code: ClassVar[str | None] = "invalid_api_key"


class Authenticator:
    def __init__(self, api_key: str | None) -> None:
        self._expected = None if api_key is None else api_key.encode()

    def check(self, authorization: str | None) -> None:
        """Check the value of the ``Authorization`` header. Raises Unauthorized. Compares in constant time."""
        if self._expected is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("an API key is required: send the header 'Authorization: Bearer <key>'")
        # Headers are handed over as Latin-1, whatever the client's bytes meant.
        if not hmac.compare_digest(token.encode("latin-1").strip(), self._expected):
            raise Unauthorized("the API key is not the one that this gateway expects")
