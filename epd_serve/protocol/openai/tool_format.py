"""The text form of a model's tool calls (the Hermes format), read as the text comes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd_serve.protocol.wire import CalledFunction

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

    def push(self, text: str, finish_reason: str | None = None) -> tuple[str, list[CallDelta]]:
        """Take more text. Return the content and calls that are certain now; with a reason, the text ends there.

        The beginning of a call is no content, even where the text ends before the call is certain: only a single
        "<" is, unless the text was cut off behind it.
        """
        self._pending += text
        deltas: list[CallDelta] = []
        content = ""
        while True:
            state = self._state
            if state == "content":
                content += self._read_content(finish_reason)
            elif state == "head":
                self._read_head(deltas)
            elif state == "arguments":
                self._read_arguments(deltas)
            else:
                self._read_marker(*(_AFTER_CALL if state == "end" else _NEXT_CALL))
            if self._state == state:
                self.content += content
                return content, deltas

    def _read_content(self, finish_reason: str | None) -> str:
        before, marker, after = self._pending.partition(CALL_START)
        if marker:
            self._pending, self._state = after, "head"
            return before
        overlap = _overlap(before, CALL_START)
        if overlap == 1 and finish_reason == "stop":
            overlap = 0
        cut = len(before) - overlap
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


def is_object(arguments: str) -> bool:
    """Whether the arguments of a call are a whole JSON object."""
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def written_calls(calls: Iterable[CalledFunction], *, behind: bool) -> str:
    """Return calls as the model writes them. ``behind``: they follow other text.

    Arguments that are no object are written as they are, and without an end: there the model was cut off.
    """
    texts = []
    for call in calls:
        name = json.dumps(call.name, ensure_ascii=False)
        if is_object(call.arguments):
            arguments, end = json.dumps(json.loads(call.arguments), ensure_ascii=False), CALL_END
        else:
            arguments, end = call.arguments, ""
        texts.append(f'{CALL_START}{{"name": {name}, "arguments": {arguments}{"}" if end else ""}{end}')
    return "\n" * behind + "\n".join(texts)


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
