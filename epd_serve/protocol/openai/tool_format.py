"""Text formats of tool calls: write calls, and parse them incrementally from generated text."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_serve.protocol.wire import CalledFunction
from epd_serve.types import ToolSchema

_NAME = re.compile(r"[\w-]+(?=[^\w-])")
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Delimiters of tool calls. Arguments are a JSON object or, with ``key``, tagged parameters: strings raw,
    other values as JSON.

    Attributes:
        opener, head: text before the first call's name.
        after_name, end: text before and after a call's arguments.
        next: text between a call's ``end`` and the next call's name.
        close: text after the last call.
        key, after_key, after_value: text around a parameter's name and value.
    """

    opener: str = "<tool_call>"
    head: str = ""
    after_name: str
    end: str
    next: str
    close: str = ""
    key: str = ""
    after_key: str = ""
    after_value: str = ""

    def write(self, calls: Iterable[CalledFunction]) -> str:
        """Return calls as the model writes them.

        Arguments other than a JSON object belong to a truncated call: write them raw, without ``end``.
        """
        texts = []
        for call in calls:
            if not is_object(call.arguments):
                texts.append(call.name + self.after_name + call.arguments)
                continue
            arguments = json.loads(call.arguments)
            written = json.dumps(arguments, ensure_ascii=False)
            if self.key:
                written = "".join(
                    self.key + name + self.after_key + _as_text(value) + self.after_value
                    for name, value in arguments.items()
                )
            texts.append(call.name + self.after_name + written + self.end)
        return self.opener + self.head + self.next.join(texts) + self.close

    def reader(self, tools: Sequence[ToolSchema]) -> ToolCallReader:
        """Return a reader for calls of these tools."""
        return TaggedCallReader(self, tools) if self.key else JsonCallReader(self)


_JSON_HEAD = '{"name": "'
_JSON = {"after_name": '", "arguments": ', "end": "}"}
_MISTRAL = "[TOOL_CALLS]"
HERMES = ToolFormat(
    head=f"\n{_JSON_HEAD}",
    after_name=_JSON["after_name"],
    end="}\n</tool_call>",
    next=f"\n<tool_call>\n{_JSON_HEAD}",
)
#: Formats by name; :func:`recognise` returns the first match.
FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen_xml": ToolFormat(
        head="\n<function=",
        after_name=">\n",
        end="</function>\n</tool_call>",
        next="\n<tool_call>\n<function=",
        key="<parameter=",
        after_key=">\n",
        after_value="\n</parameter>\n",
    ),
    "glm": ToolFormat(
        after_name="\n",
        end="</tool_call>",
        next="\n<tool_call>",
        key="<arg_key>",
        after_key="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
    ),
    "glm_compact": ToolFormat(
        after_name="",
        end="</tool_call>",
        next="<tool_call>",
        key="<arg_key>",
        after_key="</arg_key><arg_value>",
        after_value="</arg_value>",
    ),
    "mistral": ToolFormat(opener=_MISTRAL, head=f" [{_JSON_HEAD}", next=f", {_JSON_HEAD}", close="]", **_JSON),
    "mistral_v7": ToolFormat(opener=_MISTRAL, head=f"[{_JSON_HEAD}", next=f", {_JSON_HEAD}", close="]", **_JSON),
    "mistral_args": ToolFormat(opener=_MISTRAL, after_name="[ARGS]", end="", next=_MISTRAL),
}
_PROBE = CalledFunction(id="probe1234", name="probe", arguments='{"word": "a b", "count": 7}')
_PROBE_ID = re.compile(r', "id": "probe1234"|\[CALL_ID\]probe1234')


def probe_messages() -> list[dict[str, Any]]:
    """Return a chat with a tool call, for :func:`recognise` to find a chat template's format."""
    function = {"name": _PROBE.name, "arguments": json.loads(_PROBE.arguments)}
    call = {"id": _PROBE.id, "type": "function", "function": function}
    return [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def recognise(rendered: str) -> str | None:
    """Return the name of the format of rendered :func:`probe_messages`, or None if unknown."""
    text = _PROBE_ID.sub("", rendered)
    return next((name for name, one in FORMATS.items() if one.write([_PROBE]) in text), None)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of a call: first its name, then pieces of its arguments."""

    index: int
    arguments: str
    name: str | None = None


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""


class ToolCallReader(ABC):
    """Splits an answer's text into content and calls.

    The text follows the grammar of :mod:`epd_serve.engine.sampling.grammar`, but may end early. The state depends
    only on the text, so an instance that takes over an answer can restore it by replaying the text.
    """

    def __init__(self, format: ToolFormat) -> None:
        self.calls: list[Call] = []
        self.content = ""
        self._format = format
        self._pending = ""
        self._deltas: list[CallDelta] = []
        self._state = "content"  # then "head", and for each call "name", "arguments" and "between"

    def push(self, text: str, finish_reason: str | None = None) -> tuple[str, list[CallDelta]]:
        """Add text, the last if ``finish_reason`` is set. Return newly certain content and call deltas.

        An incomplete opener at the end of the text is never content, with one exception: a single first character
        of it is, if the answer ended with reason "stop".
        """
        self._pending += text
        content = ""
        while True:
            before = self._state, self._pending
            if self._state == "content":
                content += self._read_content(finish_reason)
            elif self._state == "head":
                self._skip(self._format.head, "name")
            elif self._state == "name":
                self._read_name()
            elif self._state == "arguments":
                self._read_arguments()
            else:
                self._skip(self._format.next, "name")
            if before == (self._state, self._pending):
                self.content += content
                deltas, self._deltas = self._deltas, []
                return content, deltas

    def _read_content(self, finish_reason: str | None) -> str:
        opener = self._format.opener
        before, marker, after = self._pending.partition(opener)
        if marker:
            self._pending, self._state = after, "head"
            return before
        overlap = _overlap(before, opener)
        if overlap == 1 and finish_reason == "stop":
            overlap = 0
        cut = len(before) - overlap
        self._pending = before[cut:]
        return before[:cut]

    def _skip(self, wanted: str, next_state: str) -> None:
        """Drop pending text up to and including ``wanted``, if present, and enter the next state."""
        if wanted in self._pending:
            self._pending = self._pending[self._pending.index(wanted) + len(wanted) :]
            self._state = next_state

    def _read_name(self) -> None:
        found, after_name = _NAME.match(self._pending), self._format.after_name
        if found and self._pending.startswith(after_name, found.end()):
            self.calls.append(Call(found[0]))
            self._deltas.append(CallDelta(len(self.calls) - 1, "", found[0]))
            self._pending, self._state = self._pending[found.end() + len(after_name) :], "arguments"

    @abstractmethod
    def _read_arguments(self) -> None:
        """Move pending text into the last call's arguments; enter state "between" after them."""

    def _add(self, piece: str) -> None:
        if piece:
            self.calls[-1].arguments += piece
            self._deltas.append(CallDelta(len(self.calls) - 1, piece))


class JsonCallReader(ToolCallReader):
    """Reads calls whose arguments are a JSON object."""

    def __init__(self, format: ToolFormat) -> None:
        super().__init__(format)
        self._depth, self._in_string, self._escaped = 0, False, False

    def _read_arguments(self) -> None:
        end = self._end_of_arguments()
        piece, self._pending = self._pending[:end], self._pending[end:]
        self._add(piece)
        if piece and self._depth == 0:
            self._state = "between"

    def _end_of_arguments(self) -> int:
        """Return the number of pending characters that belong to the arguments."""
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


class TaggedCallReader(ToolCallReader):
    """Reads calls with tagged parameters and converts them to a JSON object, guided by the tool's schema."""

    def __init__(self, format: ToolFormat, tools: Sequence[ToolSchema]) -> None:
        super().__init__(format)
        self._schemas = {tool.name: json.loads(tool.parameters) for tool in tools}
        self._types: frozenset[str] | None = None  # types of the current parameter
        self._num_read = 0  # parameters of the current call read so far

    def _read_arguments(self) -> None:
        format, pending = self._format, self._pending
        if self._types is not None:
            self._read_value(self._types)
        elif pending.startswith(format.end):
            self._add("}" if self._num_read else "{}")
            self._pending, self._state, self._num_read = pending[len(format.end) :], "between", 0
        elif pending.startswith(format.key) and format.after_key in pending:
            name, _, self._pending = pending.removeprefix(format.key).partition(format.after_key)
            schema = self._schemas.get(self.calls[-1].name, {})
            declared = schema.get("properties")
            self._types = types_of(declared.get(name) if isinstance(declared, dict) else None, schema)
            lead = ", " if self._num_read else "{"
            quote = '"' if self._types == {"string"} else ""
            self._add(f"{lead}{json.dumps(name, ensure_ascii=False)}: {quote}")
            self._num_read += 1

    def _read_value(self, types: frozenset[str]) -> None:
        value, found, rest = self._pending.partition(self._format.after_value)
        if types == {"string"}:
            cut = len(value) if found else len(value) - _overlap(value, self._format.after_value)
            self._add(json.dumps(value[:cut], ensure_ascii=False)[1:-1] + ('"' if found else ""))
            self._pending = rest if found else value[cut:]
        elif found:
            self._add(_as_json(value, types))
            self._pending = rest
        if found:
            self._types = None


_TYPE_NAMES: dict[type, str] = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}
_ALL_TYPES = frozenset((*_TYPE_NAMES.values(), "number", "integer"))


def types_of(schema: Any, root: Schema, depth: int = 4) -> frozenset[str]:
    """Return the JSON types that a parameter's schema allows; all types if it sets no limit."""
    schema = resolve(schema, root)
    if isinstance(named := schema.get("type"), str | list):
        return frozenset([named] if isinstance(named, str) else named)
    if "const" in schema or "enum" in schema:
        return frozenset(_type_name(value) for value in schema.get("enum", [schema.get("const")]))
    members = schema.get("anyOf") or schema.get("oneOf") or ()
    return frozenset().union(*(types_of(one, root, depth - 1) for one in members if depth)) or _ALL_TYPES


def resolve(schema: Any, root: Schema) -> Schema:
    """Return a schema with a top-level ``$ref`` replaced by its definition."""
    if not isinstance(schema, dict):
        return {}
    place, _, name = str(schema.get("$ref", "")).rpartition("/")
    definitions = root.get(place.removeprefix("#/")) if place in ("#/$defs", "#/definitions") else None
    found = (definitions or {}).get(name, schema)
    return found if isinstance(found, dict) else {}


def _type_name(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "integer" if isinstance(value, int) else "number")


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: the text itself if it is JSON of an allowed type, else a JSON string."""
    try:
        kind = _type_name(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError):
        kind = "string"
    fits = kind in types or (kind == "integer" and "number" in types)
    return text if fits and kind != "string" else json.dumps(text, ensure_ascii=False)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def is_object(arguments: str) -> bool:
    """Return whether a call's arguments are a complete JSON object."""
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def call_object(answer_id: str, choice: int, index: int, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the OpenAI API's format, with the same id on all instances that serve the answer."""
    call_id = f"call_{answer_id.rpartition('-')[2]}_{choice}_{index}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``marker``."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
