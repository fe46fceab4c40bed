"""Actions that a request's way asks for, to be carried out in their order."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from epd_serve.errors import ServeError
from epd_serve.flow.failures import TryHistory
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.routes import Route
from epd_serve.routing.table import InstanceRecord
from epd_serve.types import Stage


class Wait(Struct, frozen=True, gc=False):
    """Look again when the table has changed, at ``until_s`` at the latest; None: at once."""

    until_s: float | None = None


class Name(Struct, frozen=True, gc=False):
    """Name the media items under a fingerprint."""

    fingerprint: str


#: A try after the first: "again" where the client has nothing yet, else "continued" behind what it has.
Kind = Literal["again", "continued"]


class Try(Struct, frozen=True, gc=False):
    """Another try begins."""

    kind: Kind


class CallPrefill(Struct, frozen=True, gc=False):
    """Send the prompt to P, with the tokens that the client has already; D, if it is another one, is to expect it.

    Attributes:
        again: whether the request was sent before, if to others.
    """

    request_id: str
    route: Route
    refs: list[MediaRef]
    generated: list[int]
    again: bool


class Encode(Struct, frozen=True, gc=False):
    """Have an item encoded for P.

    Attributes:
        item: its number in the request. A video's segments are items of their own; ``place``: of the whole medium.
        patience_s: the encoder is late after it; None: it has all the time it takes.
        again: another instance has failed the item.
    """

    item: int
    ref: MediaRef
    request_id: str
    encoder: InstanceRecord
    prefill: InstanceRecord
    patience_s: float | None
    place: int
    again: bool = False


class Forward(Struct, frozen=True, gc=False):
    """Pass the answer of P or D on to the client as it comes."""

    stage: Stage


class HandOver(Struct, frozen=True, gc=False):
    """P's answer is over: D has the KV."""

    route: Route


class Listen(Struct, frozen=True, gc=False):
    """Wait so long for what D has to say."""

    seconds: float


class Release(Struct, frozen=True, gc=False):
    """D need not expect the request any more: P answers all of it."""


class CancelEncode(Struct, frozen=True, gc=False):
    """Close the call to an item's encoder, which has stopped answering."""

    item: int


class EndTry(Struct, frozen=True, gc=False):
    """Close all calls; the instances cancel those whose answers are not at their ends."""


class ReportLost(Struct, frozen=True, gc=False):
    """The connection to an instance has failed."""

    name: str


class ReportLeaving(Struct, frozen=True, gc=False):
    """An instance says that it takes no more work."""

    name: str


class Done(Struct, frozen=True, gc=False):
    """The client has the whole answer; close all calls."""


class Fail(Struct, frozen=True, gc=False):
    """Answer with an error."""

    failure: ServeError


class SplitUp(Struct, frozen=True, gc=False):
    """Each choice goes on by itself, behind the tokens of it that the client has; ``history`` is of all."""

    tokens: list[list[int]]
    history: TryHistory


#: The last of a request's actions.
End = Done | Fail | SplitUp
#: What is to be told of instances.
Note = ReportLost | ReportLeaving
Action = (
    Wait
    | Name
    | Try
    | CallPrefill
    | Encode
    | Forward
    | HandOver
    | Listen
    | Release
    | CancelEncode
    | EndTry
    | Note
    | End
)
