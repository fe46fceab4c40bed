"""The text form of a model's tool calls (the Hermes format), read as the text comes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

CALL_START = "<tool_call>\n"
CALL_END = "\n</tool_call>"
_HEAD = re.compile(r'\{"name": "([^"]*)", "arguments": ')


_AFTER_CALL = (CALL_END, "between")
_NEXT_CALL = (CALL_START, "head")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of a call: its name where it begins, then pieces of its arguments."""

    index: int
    arguments: str
    name: str | None = None


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ToolCallReader:
    """Splits an answer's text into content and calls.

    The text follows the grammar of :mod:`epd_serve.engine.sampling.grammar`, perhaps cut short. The state follows
    from the text alone, so an instance that goes on with an answer stands where the one before it stood.
    """

    calls: list[Call] = field(default_factory=list)
    content: str = ""
    _pending: str = ""
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _state: str = "content"  # then for each call "head", "arguments", "end" and "between" it and the next

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Take more text.

        Return the content and calls that are certain now, or, with ``last``, all that is left.
        """
        self._pending += text
        deltas: list[CallDelta] = []
        content = ""
        while True:
            state = self._state
            if state == "content":
                content += self._read_content(last)
            elif state == "head":
                self._read_head(deltas)
            elif state == "arguments":
                self._read_arguments(deltas)
            else:
                self._read_marker(*(_AFTER_CALL if state == "end" else _NEXT_CALL))
            if self._state == state:
                self.content += content
                return content, deltas

    def _read_content(self, last: bool) -> str:
        before, marker, after = self._pending.partition(CALL_START)
        if marker:
            self._pending, self._state = after, "head"
            return before
        cut = len(before) - (0 if last else _overlap(before, CALL_START))
        self._pending = before[cut:]
        return before[:cut]

    def _read_head(self, deltas: list[CallDelta]) -> None:
        if match := _HEAD.match(self._pending):
            self.calls.append(Call(match[1]))
            deltas.append(CallDelta(len(self.calls) - 1, "", match[1]))
            self._pending, self._state = self._pending[match.end() :], "arguments"

    def _read_arguments(self, deltas: list[CallDelta]) -> None:
        end = self._end_of_arguments()
        piece, self._pending = self._pending[:end], self._pending[end:]
        if piece:
            self.calls[-1].arguments += piece
            deltas.append(CallDelta(len(self.calls) - 1, piece))
            if self._depth == 0:
                self._state = "end"

    def _read_marker(self, wanted: str, next_state: str) -> None:
        _, marker, after = self._pending.partition(wanted)
        if marker:
            self._pending, self._state = after, next_state

    def _end_of_arguments(self) -> int:
        """The number of pending characters that belong to the arguments, an object."""
        for place, character in enumerate(self._pending):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._pending)


def call_id(answer_id: str, choice: int, index: int) -> str:
    """The id of a call, the same on every instance that has to name it."""
    return f"call_{answer_id.rpartition('-')[2]}_{choice}_{index}"


def call_object(answer_id: str, choice: int, index: int, name: str, arguments: str) -> dict[str, Any]:
    """A call in the OpenAI API's shape."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(answer_id, choice, index), "type": "function", "function": function}


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
