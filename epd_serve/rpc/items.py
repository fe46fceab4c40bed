"""The body of a streamed stage answer: items, each with events and the ids of their tokens.

A caller forwards whole items without parsing their events and knows the tokens sent, so another instance can
continue the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from epd_serve.rpc import messages
from epd_serve.rpc.messages import Frames

CONTENT_TYPE = "application/x-epd-items"
HEADERS = ((b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-cache"))
#: Values of ``choice`` for the last item: the answer is complete, or its event is an error.
END, ERROR = -1, -2
#: Far above any token's events.
MAX_BYTES = 1 << 26


class Item(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Server-sent events of a choice: an index, ``END`` or ``ERROR``."""

    choice: int
    tokens: Sequence[int]
    events: bytes


DECODER = msgspec.msgpack.Decoder(Item)


def pack(choice: int, tokens: Sequence[int], events: bytes) -> bytes:
    """Return the frame of an item."""
    return bytes(messages.pack(Item(choice, tokens, events)))


class ItemReader:
    """Splits received bytes into items.

    Attributes:
        tokens: tokens of all items read, in order.
        ended: whether an ``END`` item was read.
        error: the event of an ``ERROR`` item.
        is_over: whether either was read.
    """

    __slots__ = ("_frames", "ended", "error", "is_over", "tokens")

    def __init__(self) -> None:
        self._frames = Frames(DECODER, MAX_BYTES)
        self.tokens: list[int] = []
        self.ended = self.is_over = False
        self.error: bytes | None = None

    def read(self, chunk: bytes) -> bytes:
        """Add a chunk and return the events of the items now complete. Raises LinkClosed."""
        events = b""
        for item in self._frames.take(chunk):
            if item.choice < 0:
                self.is_over, self.ended = True, item.choice == END
                if not self.ended:
                    self.error = item.events
                    break
            self.tokens += item.tokens
            events += item.events
        return events
