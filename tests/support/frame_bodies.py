"""Bodies of frames, taken apart."""

from __future__ import annotations

RECORD_SEPARATOR = b"\x1e"


def whole_frames(body: bytes) -> list[tuple[int, list[int], bytes]]:
    """(choice, token ids, events) of each frame of a body. Raises ValueError where it is no sequence of them."""
    *parts, rest = body.split(RECORD_SEPARATOR)
    if rest or len(parts) & 1:
        raise ValueError("the body ends within a frame")
    found = []
    for label, events in zip(parts[::2], parts[1::2], strict=True):
        choice, *tokens = map(int, label.split(b","))
        found.append((choice, tokens, events))
    return found
