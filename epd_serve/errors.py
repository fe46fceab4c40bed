"""The exceptions that cross a boundary of the system, each with its HTTP status.

::

    ServeError                  500  something failed that the client could not have prevented
    ├── InvalidRequest          400  the request is wrong; ``param`` names the field
    │   ├── ModelNotFound       404
    │   └── TooLarge            413
    ├── Conflict                409  another operation on the same object is under way
    ├── Unavailable             503  no instance can take the request now; trying again later may help
    │   └── Overloaded          429  a queue is full
    ├── InstanceFailed          502  an instance died or stopped while it had the request
    │   └── InstanceLost        502  the connection to it failed
    │       ├── InstanceUntrusted
    │       └── InstanceUnreachable
    └── StageTimeout            504  a stage did not answer before its deadline
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True):
    """The ``error`` object of the OpenAI API."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct):
    """The body of an error response: ``{"error": {...}}``."""

    error: ErrorBody


class ServeError(Exception):
    """Base of all errors that reach a client, with the fields of the OpenAI error object."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """``retry_after_s``: time after which a retry may succeed, if known."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def with_more(self, more: str) -> Self:
        """Return this error with ``more`` appended to its message."""
        other = type(self).__new__(type(self), f"{self.message}; {more}")  # constructors differ
        vars(other).update(vars(self), message=str(other))
        return other

    def body(self) -> dict[str, Any]:
        """Return OpenAI's JSON object ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self.body())


class InvalidRequest(ServeError):
    status = 400
    type = "invalid_request_error"


class ModelNotFound(InvalidRequest):
    status = 404
    default_code = "model_not_found"


class TooLarge(InvalidRequest):
    status = 413
    default_code = "request_too_large"


class Conflict(ServeError):
    status = 409
    type = "conflict"


class Unavailable(ServeError):
    status = 503
    type = "service_unavailable"


class Overloaded(Unavailable):
    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"


class InstanceFailed(ServeError):
    status = 502
    type = "instance_error"


class InstanceLost(InstanceFailed):
    """The connection to an instance could not be made, or broke before the answer was complete."""


class InstanceUntrusted(InstanceLost):
    """An instance's info contradicts the deployment or itself, or it lacks the deployment's key."""


class InstanceUnreachable(InstanceLost):
    """The connection to an instance failed, so the instance never received the call.

    Attributes:
        is_refused: the host answers, but no process listens on the port.
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class StageTimeout(ServeError):
    status = 504
    type = "timeout_error"


# Codes of errors.
#: Unavailable: all preparation threads of this instance are busy; another instance may have a free one.
PREPARATION_FULL = "preparation_full"
#: The instance is draining or has switched roles; another instance continues the request.
DRAINING = "draining"
#: A prefill instance reports that the decode instance is draining.
DECODE_DRAINING = "decode_draining"
#: The request's two instances cannot reach each other. Both may be healthy and reach other instances.
PEER_UNREACHABLE = "peer_unreachable"
#: P cannot map the device memory that holds a feature; E then offers it in host memory.
NOT_MAPPED = "not_mapped"
#: Unavailable: the decode instance lacks blocks for a request's KV.
NO_ROOM = "no_room"
#: Unavailable: a prefill instance asks for a request that the decode instance has ended. The decode call carries
#: the cause.
REQUEST_ENDED = "request_ended"
#: The instance of a stream with several choices failed; such a stream cannot continue elsewhere.
CHOICES_LOST = "choices_lost"

_UNAUTHORIZED = 401
#: Maximum length of an instance's message in an error; longer ones are cut.
_MAX_MESSAGE = 4000
_BY_STATUS: dict[int, type[ServeError]] = {
    cls.status: cls
    for cls in (
        InvalidRequest,
        ModelNotFound,
        TooLarge,
        Conflict,
        Unavailable,
        Overloaded,
        InstanceFailed,
        StageTimeout,
    )
} | {_UNAUTHORIZED: ServeError}


def error_from_response(status: int, body: bytes, *, origin: str) -> ServeError:
    """Rebuild the error that an instance returned.

    A 401 becomes a ServeError: the deployment's key is wrong, not the request.

    Args:
        status: HTTP status of the answer, 400 or above.
        body: body of the answer; the message quotes it unless it is an OpenAI error object.
        origin: the instance's name, for the message if the body does not explain the error.
    """
    cls = _BY_STATUS.get(status, InvalidRequest if 400 <= status < 500 else ServeError)
    try:
        error = msgspec.json.decode(body, type=ErrorEnvelope).error
    except ValueError:  # also invalid UTF-8
        text = body[:200].decode("utf-8", "replace")
        return cls(f"{origin} answered {status}: {text or 'nothing'}")
    message = error.message[:_MAX_MESSAGE]
    message = f"{origin}: {message}" if status == _UNAUTHORIZED else message
    return cls(message, param=error.param, code=error.code)


@contextmanager
def needs_native() -> Iterator[None]:
    """Replace the error of a missing package by a ValueError with the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers", "numpy", "safetensors", "llguidance"):
            raise
        raise ValueError(
            f"{missing} is not installed; run in epd-serve's clone: pip install '.[native]'"
        ) from error
