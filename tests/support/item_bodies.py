"""Bodies of items, taken apart."""

from __future__ import annotations

from epd_serve.rpc.items import DECODER, MAX_BYTES
from epd_serve.rpc.messages import Frames


def whole_items(body: bytes) -> list[tuple[int, list[int], bytes]]:
    """(choice, token ids, events) of each item of a body. Raises ValueError where it is no sequence of them."""
    frames = Frames(DECODER, MAX_BYTES)
    found = [(item.choice, list(item.tokens), item.events) for item in frames.take(body)]
    if frames.rest:
        raise ValueError("the body ends within an item")
    return found
