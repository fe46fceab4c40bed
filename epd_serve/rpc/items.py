"""The body of a streamed stage answer: items, each some events together with the ids of their tokens.

A caller forwards events unparsed and still knows which tokens are out, so that another instance can go on where
this one stopped. An item is forwarded whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from epd_serve.rpc import messages
from epd_serve.rpc.messages import Frames

CONTENT_TYPE = "application/x-epd-items"
HEADERS = ((b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-cache"))
#: In place of a choice: the answer is complete with this item; the answer failed, which is what the event says.
END, ERROR = -1, -2
#: No event of a token comes near to it.
MAX_BYTES = 1 << 26


class Item(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Server-sent events of a choice; ``choice`` is an index, ``END`` or ``ERROR``."""

    choice: int
    tokens: Sequence[int]
    events: bytes


DECODER = msgspec.msgpack.Decoder(Item)


def pack(choice: int, tokens: Sequence[int], events: bytes) -> bytes:
    """Return an item as it travels."""
    return bytes(messages.pack(Item(choice, tokens, events)))


class ItemReader:
    """Takes bytes as they come, gives the events of whole items.

    Attributes:
        tokens: of the items that were read, in the order in which they were sent.
        ended: whether the last of them was ``END``.
        error: the event of the one that was ``ERROR``; nothing is read behind it.
        is_over: whether one of both was among them.
    """

    __slots__ = ("_frames", "ended", "error", "is_over", "tokens")

    def __init__(self) -> None:
        self._frames = Frames(DECODER, MAX_BYTES)
        self.tokens: list[int] = []
        self.ended = self.is_over = False
        self.error: bytes | None = None

    def read(self, chunk: bytes) -> bytes:
        """Return the events of the items that are whole now. Raises LinkClosed for what cannot be an item."""
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
