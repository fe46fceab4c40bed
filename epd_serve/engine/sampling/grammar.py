"""Grammars as token masks, by llguidance: JSON schemas, regular expressions, choices, tool calls.

Tool calls follow the format of the model's chat template (:mod:`epd_serve.protocol.openai.tool_format`).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import msgspec
import numpy as np
from numpy.typing import NDArray

from epd_serve.engine.sampling.json_schema import enforceable
from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.tool_format import FORMATS, ToolFormat, resolve, types_of
from epd_serve.types import Grammar, Thinking, ToolSchema, grammar_problem

#: Size of the cache of compiled grammars.
_MAX_CACHED = 64
#: Classes of regular expressions by the letter behind the backslash; llguidance's own are those of Unicode.
_ASCII = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[\t\n\v\f\r ]"}
_ASCII |= {letter.upper(): f"[^{members[1:]}" for letter, members in _ASCII.items()}
#: The spacing of ``json.dumps``, as in chat templates; prevents endless blanks.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class MatcherConstraint:
    """A grammar, and one choice's position in it. Used by one thread at a time.

    Attributes:
        grammar: the grammar.
        error: set when the grammar exceeds its complexity limits; then only the end is allowed.
    """

    __slots__ = ("_ends", "_matcher", "_num_consumed", "_num_tokens", "error", "grammar")

    def __init__(
        self, grammar: Grammar, matcher: Any, num_tokens: int, ends: frozenset[int], num_consumed: int = 0
    ) -> None:
        self.grammar = grammar
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._ends = ends
        self._num_consumed = num_consumed
        self.error = ""

    def allowed(self, output_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return a bit mask of allowed tokens, [vocab / 32]; ``output_ids`` may only grow between calls."""
        for token in output_ids[self._num_consumed :]:
            if token not in self._ends:
                self._matcher.consume_token(token)
        self._num_consumed = len(output_ids)
        mask = llguidance.numpy.allocate_token_bitmask(1, self._num_tokens)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask, 0)
        row: NDArray[np.int32] = mask[0]
        if self._matcher.is_error():
            self.error = grammar_problem(self._matcher.get_error())
            row[:] = 0
        if self.error or self._matcher.is_accepting() or not row.any():
            for token in self._ends:
                row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return row

    def fork(self) -> MatcherConstraint:
        """Return a copy of the state for another choice."""
        copy = self._matcher.deep_copy()
        return MatcherConstraint(self.grammar, copy, self._num_tokens, self._ends, self._num_consumed)


class ThinkingConstraint:
    """Leaves thinking free up to its budget and applies the grammar to the answer after it. Used by one thread.

    Attributes:
        error: the grammar's error.
    """

    def __init__(
        self,
        thinking: Thinking,
        budget: int | None,
        grammar: MatcherConstraint | None,
        num_tokens: int,
        ends: Collection[int],
    ) -> None:
        """``budget``: maximum tokens of thinking. ``num_tokens``: vocabulary size.

        ``ends``: tokens that end an answer, forbidden during thinking before a structured answer.
        """
        self._thinking, self._budget, self._grammar = thinking, budget, grammar
        self._num_tokens, self._ends = num_tokens, ends
        self._in_thought, self._after_thought = self._all_but(ends), self._all_but(())
        self._is_open = thinking.is_open
        self._num_thought = 0
        self._num_seen = 0
        self._begin = 0  # the first token of the answer

    @property
    def error(self) -> str:
        return "" if self._grammar is None else self._grammar.error

    def allowed(self, output_ids: Sequence[int]) -> NDArray[np.int32]:
        """As :meth:`MatcherConstraint.allowed`."""
        thinking = self._thinking
        for place in range(self._num_seen, len(output_ids)):
            if self._is_open:
                self._is_open = output_ids[place] != thinking.end_id
                self._num_thought += self._is_open
                self._begin = place + 1 + len(thinking.after_ids)
            elif place == 0:
                self._is_open = output_ids[0] == thinking.start_id
        self._num_seen = num_seen = len(output_ids)
        if self._is_open:
            is_over = self._budget is not None and self._num_thought >= self._budget
            return self._only(thinking.end_id) if is_over else self._in_thought
        if num_seen < self._begin:
            return self._only(thinking.after_ids[num_seen - self._begin])
        if self._grammar is None:
            return self._after_thought
        allowed = self._grammar.allowed(output_ids[self._begin :])
        return allowed if num_seen else allowed | self._only(thinking.start_id)

    def fork(self) -> ThinkingConstraint:
        """Return a copy of the state for another choice, before its first token."""
        grammar = None if self._grammar is None else self._grammar.fork()
        return ThinkingConstraint(self._thinking, self._budget, grammar, self._num_tokens, self._ends)

    def _all_but(self, tokens: Collection[int]) -> NDArray[np.int32]:
        row = np.full((self._num_tokens + 31) // 32, -1, np.int32)
        for token in tokens:
            row &= ~self._only(token)
        return row

    def _only(self, token: int) -> NDArray[np.int32]:
        row = np.zeros((self._num_tokens + 31) // 32, np.uint32)
        row[token // 32] = 1 << token % 32
        return row.view(np.int32)


class Grammars:
    """Compiles grammars for one tokenizer. Safe for use from several threads."""

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int]) -> None:
        """``eos_token_ids`` end an answer; if empty, the tokenizer's EOS does."""
        self._tokenizer = tokenizer
        self._added = {str(token.content): one for one, token in tokenizer.added_tokens_decoder.items()}
        self._ends = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Any] = OrderedDict()
        self._vocabulary: Any = None

    @property
    def num_tokens(self) -> int:
        """Vocabulary size of the masks."""
        return len(self._tokenizer)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a structured answer. Raises InvalidRequest if the model lacks them."""
        return self._ends | {self.end_token_id}

    @property
    def end_token_id(self) -> int:
        """A token that ends a structured answer. Raises InvalidRequest if the model lacks one."""
        if self._tokenizer.eos_token_id is not None:
            return int(self._tokenizer.eos_token_id)
        if self._ends:
            return min(self._ends)
        raise InvalidRequest("this model lacks an end-of-answer token, which structured output needs")

    def constraint(self, grammar: Grammar) -> MatcherConstraint:
        """Return a constraint for the grammar. Raises InvalidRequest with the unsupported part."""
        key = msgspec.msgpack.encode(grammar)
        with self._lock:
            vocabulary, matcher = self._vocabulary_of(grammar), self._cache.get(key)
        if matcher is None:  # without the lock, so that other grammars need not wait
            matcher = llguidance.LLMatcher(vocabulary, as_lark(grammar, self._added), log_level=0)
            if matcher.is_error():
                raise InvalidRequest(
                    f"{grammar.param}: this structure cannot be enforced: {grammar_problem(matcher.get_error())}",
                    param=grammar.param,
                )
        with self._lock:
            self._cache[key] = matcher
            self._cache.move_to_end(key)
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
            copy = matcher.deep_copy()
        return MatcherConstraint(grammar, copy, vocabulary.vocab_size, self.ends)

    def _vocabulary_of(self, grammar: Grammar) -> Any:
        if self._vocabulary is None:
            try:
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self.num_tokens, eos_token=self.end_token_id
                )
            except (TypeError, ValueError) as error:
                raise InvalidRequest(
                    f"this model's tokenizer cannot be used for structured output: {error}", param=grammar.param
                ) from error
        return self._vocabulary


def as_lark(grammar: Grammar, added: Mapping[str, int] | None = None) -> str:
    """Return the grammar in llguidance's variant of Lark.

    ``added``: the tokenizer's added tokens, used in the fixed texts of tool calls only.
    """
    rules: list[str] = []
    if grammar.tools:
        rules += _Calls(FORMATS[grammar.format], added or {}).rules(grammar)
    else:
        rules.append("start: content")
    if grammar.kind and not grammar.must_call:
        rules.append(f"content: {_content(grammar)}")
    return "\n".join(rules) + "\n"


class _Calls:
    """The rules of tool calls in one format."""

    def __init__(self, format: ToolFormat, added: Mapping[str, int]) -> None:
        self._format = format
        self._added = added
        self._spelling = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")

    def rules(self, grammar: Grammar) -> list[str]:
        format = self._format
        opener, marker = self._text(format.opener), _regex(format.opener)
        again = f"({self._text(format.next)} call)*" if grammar.parallel else ""
        rules = [f"more: {self._text(format.head)} call {again} {self._text(format.close)}"]
        free = f"/(.|\\n)*/ & ~/(.|\\n)*{marker}(.|\\n)*/"
        if grammar.must_call or grammar.kind:
            rules.insert(0, f"start: {'' if grammar.must_call else 'content | '}{opener} more")
        elif format.opener in self._added:
            rules = [f"start: FREE ({opener} more)?", f"FREE: {free}", *rules]
        else:
            opened = f"opened[lazy]: /(.|\\n)*{marker}/"
            rules = ["start: FREE | opened more", f"FREE: {free}", opened, *rules]
        rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(grammar.tools)))}")
        for i, tool in enumerate(grammar.tools):
            schema = json.loads(tool.parameters)
            rules.append(
                f"call_{i}: {self._text(tool.name + format.after_name)} args_{i} {self._text(format.end)}"
            )
            rules += (
                self._tagged(i, tool, schema)
                if format.key
                else [f"args_{i}: {_json(schema, is_strict=tool.strict, objects_only=True)}"]
            )
        if format.key:
            end = _regex(format.after_value)
            if self._spelling.match(format.after_value):
                rules.append(f"text_value: PLAIN {self._text(format.after_value)}")
                rules.append(f"PLAIN: /(.|\\n)*/ & ~/(.|\\n)*{end}(.|\\n)*/")
            else:
                rules.append(f"text_value[lazy]: /(.|\\n)*{end}/")
            rules.append(r"KEY: /[\w.-]+/")
        return rules

    def _tagged(self, number: int, tool: ToolSchema, schema: dict[str, Any]) -> list[str]:
        """Return the rules of a tool's parameters, in the order of its schema."""
        format = self._format
        declared, required = schema.get("properties"), schema.get("required") or ()
        if not isinstance(declared, dict):
            if schema.get("additionalProperties") is False:
                return [f'args_{number}: ""']
            return [f"args_{number}: ({self._text(format.key)} KEY {self._text(format.after_key)} text_value)*"]
        order = (f"p_{number}_{i}{'' if name in required else '?'}" for i, name in enumerate(declared))
        rules = [f"args_{number}: {' '.join(order) or _text('')}"]
        for i, (name, value) in enumerate(declared.items()):
            key = self._text(format.key + name + format.after_key)
            rules.append(f"p_{number}_{i}: {key} ({self._value(value, schema, tool.strict)})")
        return rules

    def _value(self, schema: Any, root: dict[str, Any], is_strict: bool, depth: int = 4) -> str:
        """Return the rule of a parameter's value and its end."""
        schema, end = resolve(schema, root), self._text(self._format.after_value)
        if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
            texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in choices)
            return " | ".join(f"{_text(text)} {end}" for text in texts)
        members = [self._value(one, root, is_strict, depth - 1) for one in schema.get("anyOf") or () if depth]
        if members and "text_value" not in members:
            return " | ".join(members)
        if "string" in types_of(schema, root):
            return "text_value"
        definitions = {name: value for name, value in root.items() if name in ("$defs", "definitions")}
        return f"{_json({**definitions, **schema}, is_strict=is_strict)} {end}"

    def _text(self, text: str) -> str:
        """Return a fixed text with added tokens written as ids."""
        places = [(found.start(), found.end()) for found in self._spelling.finditer(text)]
        parts, at = [], 0
        for start, end in places:
            parts += [_text(text[at:start]), f"<[{self._added[text[start:end]]}]>"]
            at = end
        return " ".join(part for part in (*parts, _text(text[at:])) if part != '""')


def _regex(text: str) -> str:
    """Return a regular expression that matches a text, for use between slashes."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")


def _content(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return _json(json.loads(grammar.text), is_strict=grammar.strict)
    if grammar.kind == "regex":
        return f"/{_escape_slashes(_ascii(grammar.text))}/"
    return " | ".join(_text(choice) for choice in json.loads(grammar.text))


def _ascii(regex: str) -> str:
    """Let the classes of digits, word characters and spaces mean ASCII, as in ECMAScript and vLLM."""
    return re.sub(r"\\(.)", lambda found: _ASCII.get(found[1], found[0]), regex, flags=re.DOTALL)


def _json(schema: dict[str, Any], *, is_strict: bool, objects_only: bool = False) -> str:
    """Return the rule of a JSON schema; unless strict, unsupported keywords are ignored."""
    if objects_only and "type" not in schema and not {"$ref", "anyOf", "allOf", "oneOf"} & set(schema):
        schema = {"type": "object", **schema}
    options = {**_SPACING, "lenient": not is_strict}
    enforced = enforceable(schema, is_strict=is_strict)
    return "%json " + json.dumps({**enforced, "x-guidance": options}, ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape_slashes(pattern: str) -> str:
    """Escape a regular expression for use between slashes."""
    escaped, out = False, []
    for character in pattern:
        out.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)
