"""The exceptions that cross a boundary of the system, each with its HTTP status.

::

    ServeError                  500  something failed that the client could not have prevented
    ├── InvalidRequest          400  the request is wrong; ``param`` names the field
    │   ├── ModelNotFound       404
    │   └── TooLarge            413
    ├── Conflict                409  something else is under way with what the request is about
    ├── Unavailable             503  no instance can take the request now; trying again later may help
    │   └── Overloaded          429  a queue is full
    ├── InstanceFailed          502  an instance died or broke off while it had the request
    │   └── InstanceLost        502  the connection to it
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
    """``{"error": {...}}`` as it travels."""

    error: ErrorBody


class ServeError(Exception):
    """Base of all errors that reach a client; carries what the OpenAI error object needs."""

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
        """``retry_after_s``: when trying again may help, where that is known."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def with_more(self, more: str) -> Self:
        """Return this error with ``more`` behind its message."""
        other = type(self).__new__(type(self), f"{self.message}; {more}")  # constructors differ
        vars(other).update(vars(self), message=str(other))
        return other

    def body(self) -> dict[str, Any]:
        """The JSON object ``{"error": {message, type, param, code}}`` of the OpenAI API."""
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
    """An instance's info contradicts the deployment or itself, or it has not the deployment's key."""


class InstanceUnreachable(InstanceLost):
    """No connection to an instance could be made: it has not seen the call.

    Attributes:
        is_refused: the host answers, but no process listens on the port.
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class StageTimeout(ServeError):
    status = 504
    type = "timeout_error"


#: Code of the Unavailable of an instance that has no thread left to prepare a request: another may have one.
PREPARATION_FULL = "preparation_full"
#: Code of the error of an instance that finishes what it has and takes nothing new, or serves another role by now.
#: It has computed nothing wrong: the request goes on at another.
DRAINING = "draining"
#: The same of the decode instance that a prefill instance, which stays, has asked.
DECODE_DRAINING = "decode_draining"
#: Code of the error of an instance that cannot reach the other one of a request, or be reached by it. Both may be
#: well and reach others: what has failed is the two together.
PEER_UNREACHABLE = "peer_unreachable"
#: Code of the error of an instance that does not reach the device with a feature: it takes it from the host.
NOT_MAPPED = "not_mapped"
#: Code of the Unavailable of a decode instance without blocks for a request's KV.
NO_ROOM = "no_room"
#: Code of the Unavailable of a decode instance that is through with a request for which a prefill instance asks.
#: What ended the request there is the answer to the call that it came with.
REQUEST_ENDED = "request_ended"
#: Code of the error that ends a stream of several choices whose instance has failed: it does not go on elsewhere.
CHOICES_LOST = "choices_lost"

_UNAUTHORIZED = 401
#: Characters of an instance's message that are passed on.
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
    """Rebuild the error that an instance answered with.

    That it does not know its caller (401) is a fault of the deployment, not of the request: a ServeError.

    Args:
        status: HTTP status of the answer, 400 or above.
        body: its body; anything but an OpenAI error object is quoted in the message.
        origin: the instance's name, for the message where the body is no help.
    """
    cls = _BY_STATUS.get(status, InvalidRequest if 400 <= status < 500 else ServeError)
    try:
        error = msgspec.json.decode(body, type=ErrorEnvelope).error
    except msgspec.MsgspecError:
        text = body[:200].decode("utf-8", "replace")
        return cls(f"{origin} answered {status}: {text or 'nothing'}")
    message = error.message[:_MAX_MESSAGE]
    message = f"{origin}: {message}" if status == _UNAUTHORIZED else message
    return cls(message, param=error.param, code=error.code)


@contextmanager
def needs_native() -> Iterator[None]:
    """Turns a missing torch into what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers", "numpy", "safetensors", "llguidance"):
            raise
        raise ValueError(
            f"{missing} is not installed; run in epd-serve's clone: pip install '.[native]'"
        ) from error
