"""Events that a request's way is told of. Tokens are none of them: they go past it to the client."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

from epd_serve.errors import ServeError
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import Stage


class Progress(Protocol):
    """The part of the answer that its client has, over all instances that gave some of it."""

    @property
    def begun(self) -> bool:
        """Whether the client has anything of it."""

    @property
    def complete(self) -> bool:
        """Whether the client has all of it."""

    def tokens_of_each(self) -> list[list[int]] | None:
        """The ids of all tokens that the client has, by choice; None where they are not known."""


class Look(Struct, frozen=True, gc=False):
    """It is time to look for instances. Clocks are monotonic seconds.

    Attributes:
        wait_s: how long a request waits for an instance where none is left for a stage: from when it lost its own,
            or from when there was the last one.
        complete_at_s: when there was an instance for each stage last; None: never.
    """

    now_s: float
    wait_s: float = 0.0
    complete_at_s: float | None = None


class Named(Struct, frozen=True, gc=False):
    """The media items have their names under P's fingerprint.

    Attributes:
        refs: in the request's order.
        params: the field of the request that each came in.
    """

    refs: list[MediaRef]
    params: list[str | None]


class Opened(Struct, frozen=True, gc=False):
    """The answer of P or D has begun; ``follows``: P says that the rest of it comes from D."""

    stage: Stage
    follows: bool = False


class Refused(Struct, frozen=True, gc=False):
    """A call to P or D has failed before its answer began."""

    stage: Stage
    failure: ServeError


class Ended(Struct, frozen=True, gc=False):
    """The answer of P or D has come to its end, and the client has all of it that there was."""

    stage: Stage


class Broke(Struct, frozen=True, gc=False):
    """The answer of P or D has failed after it began.

    Attributes:
        kind: "lost": the connection broke; "said": the instance said why, or sent what no instance should;
            "unreadable": it cannot be passed on.
    """

    stage: Stage
    failure: ServeError
    kind: Literal["lost", "said", "unreadable"]


class Encoded(Struct, frozen=True, gc=False):
    """The feature of an item is stored and announced. Items go by their numbers, as in actions."""

    item: int


class EncodeFailed(Struct, frozen=True, gc=False):
    """An encoder has failed an item."""

    item: int
    failure: ServeError


class EncodeLate(Struct, frozen=True, gc=False):
    """An encoder has had the time that it was given for an item."""

    item: int


class Lost(Struct, frozen=True, gc=False):
    """An instance has stopped answering, though its connections may be open."""

    name: str


class Silent(Struct, frozen=True, gc=False):
    """The instance that may know why another has failed has said nothing in the time that it was given."""


class Abandoned(Struct, frozen=True, gc=False):
    """The client is gone, or the request's time is over."""


#: Events of a try whose calls have been made.
Sent = Opened | Refused | Ended | Broke | Encoded | EncodeFailed | EncodeLate | Lost | Silent
Event = Look | Named | Sent | Abandoned
