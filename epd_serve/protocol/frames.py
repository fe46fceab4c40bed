"""The body of a streamed stage answer: each event together with the tokens that it tells of.

A caller forwards events unparsed and still knows which tokens are out, so that another instance can go on where
this one stopped. One frame is ``u32 n | u16 choice | u16 tokens | u32 token id ... | server-sent events``,
little-endian; ``n`` counts the bytes that follow it. A frame is forwarded whole or not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

CONTENT_TYPE = "application/x-epd-frames"
HEADERS = ((b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-cache"))
#: In place of a choice: the answer is complete with this frame; the answer failed, which is what the event says.
END, ERROR = 0xFFFF, 0xFFFE
HEAD = struct.Struct("<IHH")
#: No event of a token comes near to it.
MAX_NBYTES = 1 << 26

_ONE_TOKEN = struct.Struct("<IHHI")
_LENGTH_NBYTES = 4
_TOKEN_NBYTES = 4


class FrameError(ValueError):
    """Bytes that are no frame."""


def pack(choice: int, token_ids: Sequence[int], events: bytes) -> bytes:
    """One frame. ``choice`` is an index below ``ERROR``, ``END`` or ``ERROR``."""
    if len(token_ids) == 1:
        return _ONE_TOKEN.pack(len(events) + 8, choice, 1, token_ids[0]) + events
    count = len(token_ids)
    nbytes = HEAD.size - _LENGTH_NBYTES + _TOKEN_NBYTES * count + len(events)
    return HEAD.pack(nbytes, choice, count) + struct.pack(f"<{count}I", *token_ids) + events


class FrameReader:
    """Takes bytes as they come, gives whole frames."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def is_between_frames(self) -> bool:
        return not self._rest

    def feed(self, chunk: bytes) -> Iterator[tuple[int, memoryview, memoryview]]:
        """(choice, token ids as little-endian u32, events) of each frame that is whole now.

        Raises FrameError for what cannot be a frame.
        """
        data = self._rest + chunk if self._rest else chunk
        view, start = memoryview(data), 0
        while len(data) - start >= HEAD.size:
            nbytes, choice, num_tokens = HEAD.unpack_from(data, start)
            events = start + HEAD.size + _TOKEN_NBYTES * num_tokens
            end = start + _LENGTH_NBYTES + nbytes
            if end < events or nbytes > MAX_NBYTES:
                raise FrameError(f"a frame of {nbytes} bytes with {num_tokens} tokens")
            if end > len(data):
                break
            yield choice, view[start + HEAD.size : events], view[events:end]
            start = end
        self._rest = bytes(view[start:])


def skim(data: bytes) -> tuple[list[bytes], list[bytes], int]:
    """The token frames at the start of ``data``, many of them at a time.

    Returns their events, their token ids (as in :meth:`FrameReader.feed`), and the index of the first byte that is
    not of these frames: what stands there is for a FrameReader.
    """
    events, token_ids, start, size = [], [], 0, len(data)
    unpack, head_size = HEAD.unpack_from, HEAD.size
    while size - start >= head_size:
        nbytes, choice, num_tokens = unpack(data, start)
        tokens_start = start + head_size
        tokens_end = tokens_start + _TOKEN_NBYTES * num_tokens
        end = start + _LENGTH_NBYTES + nbytes
        if end > size or end < tokens_end or choice >= ERROR:
            break
        token_ids.append(data[tokens_start:tokens_end])
        events.append(data[tokens_end:end])
        start = end
    return events, token_ids, start


def events_of(frames: Iterable[bytes]) -> bytes:
    """The server-sent events of an answer, for those that do not care about tokens."""
    reader = FrameReader()
    return b"".join(bytes(events) for chunk in frames for _, _, events in reader.feed(chunk))
