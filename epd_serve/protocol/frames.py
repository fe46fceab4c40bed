"""The body of a streamed stage answer: each event together with the ids of its tokens.

A caller forwards events unparsed and still knows which tokens are out, so that another instance can go on where
this one stopped. One frame is ``label RS events RS``: the label is the choice and the ids of its tokens in
decimal, with commas between them; events are server-sent events. RS (0x1E) is a control character, which JSON
never has in it unescaped (RFC 8259, section 7), so that a piece with many frames is taken apart by one ``split``.
A frame is forwarded whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

CONTENT_TYPE = "application/x-epd-frames"
HEADERS = ((b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-cache"))
#: In place of a choice: the answer is complete with this frame; the answer failed, which is what the event says.
END, ERROR = -1, -2
#: No event of a token comes near to it.
MAX_NBYTES = 1 << 26

_RS = b"\x1e"
_LABEL = re.compile(rb"(?:[0-9]+|-[12])(?:,[0-9]+)*")
_ONE_TOKEN = re.compile(rb"([0-9]+,[0-9]+)\x1e([^\x1e]*)\x1e").fullmatch
_ERROR_LABEL = b"%d" % ERROR
_END_LABEL = b"%d" % END


class FrameError(ValueError):
    """Bytes that are no frame."""


def pack(choice: int, token_ids: Sequence[int], events: bytes) -> bytes:
    """One frame. ``choice`` is an index, ``END`` or ``ERROR``. ``events`` must be without RS."""
    assert _RS not in events, "server-sent events of JSON"
    if len(token_ids) == 1:
        return b"%d,%d\x1e%b\x1e" % (choice, token_ids[0], events)
    return b"%b\x1e%b\x1e" % (b",".join([b"%d" % number for number in (choice, *token_ids)]), events)


class FrameReader:
    """Takes bytes as they come, gives whole frames.

    Attributes:
        labels: labels of the frames that were read, with semicolons between them (:func:`token_ids`).
        ended: whether the last of them was ``END``.
        error: the event of the one that was ``ERROR``; nothing is read behind it.
        is_over: whether one of both was among them.
    """

    __slots__ = ("_rest", "ended", "error", "is_over", "labels")

    def __init__(self) -> None:
        self._rest = b""
        self.labels: list[bytes] = []
        self.ended = self.is_over = False
        self.error: bytes | None = None

    def read(self, chunk: bytes) -> bytes:
        """The events of the frames that are whole now. Raises FrameError for what cannot be a frame."""
        rest = self._rest
        if not rest and (token := _ONE_TOKEN(chunk)) is not None:  # as it is where tokens come one by one
            label, events = token.groups()
            self.labels.append(label)
            return events
        parts = (rest + chunk if rest else chunk).split(_RS)
        if len(parts) & 1:
            self._rest = parts.pop()
        else:
            self._rest = parts[-2] + _RS + parts[-1]
            del parts[-2:]
        if len(self._rest) > MAX_NBYTES:
            raise FrameError(f"{len(self._rest)} bytes without an end")
        if not parts:
            return b""
        labels, all_events = parts[::2], parts[1::2]
        if labels[-1] == _END_LABEL or labels[-1].startswith(_END_LABEL + b","):
            self.ended = self.is_over = True
            labels[-1] = labels[-1][1:]
        text = b";%b;" % b";".join(labels)
        if (
            text.translate(None, b"0123456789,") != b";" * (len(labels) + 1)
            or b";;" in text
            or b";," in text
            or b",," in text
            or b",;" in text
        ):
            self._take_error(labels, all_events)
            text = b";%b;" % b";".join(labels)
        self.labels.append(text)
        return all_events[0] if len(all_events) == 1 else b"".join(all_events)

    def _take_error(self, labels: list[bytes], events: list[bytes]) -> None:
        """Cut the frame at an error's label. Raises FrameError for a label that is none."""
        for index, label in enumerate(labels):
            if _LABEL.fullmatch(label) is None:
                raise FrameError(f"{label[:80]!r} is no label of a frame")
            if label.startswith(_ERROR_LABEL):
                self.error = events[index]
                self.ended, self.is_over = False, True
                del labels[index:], events[index:]
                return


def token_ids(labels: Iterable[bytes]) -> list[int]:
    """The tokens of :attr:`FrameReader.labels`, in the order in which they were sent."""
    return [int(token) for text in labels for label in text.split(b";") for token in label.split(b",")[1:]]


def num_tokens(labels: Iterable[bytes]) -> int:
    return sum([text.count(b",") for text in labels])
