"""Grammars as token masks, by llguidance: JSON schemas, regular expressions, choices, tool calls.

A call is written as in the Hermes format, which Qwen's chat templates use::

    <tool_call>
    {"name": "lookup", "arguments": {"word": "fox"}}
    </tool_call>
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import msgspec
import numpy as np
from numpy.typing import NDArray

from epd_serve.engine.sampling.json_schema import close_objects
from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.tool_format import CALL_END, CALL_START
from epd_serve.types import Grammar, ToolSchema, grammar_problem

#: Compiled grammars kept for requests that ask for the same.
_MAX_CACHED = 64
#: As ``json.dumps`` writes it, which is what chat templates show to the model; no endless blanks.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class MatcherConstraint:
    """A grammar, and one choice's position in it. Used by one thread at a time.

    Attributes:
        grammar: that it follows.
        error: set when the grammar became too complex for its limits; then only the end is allowed.
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
        """Return the tokens that may follow, a bit each, [vocab / 32]; ``output_ids`` only grow between calls."""
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
        """Return the same state for another choice."""
        copy = self._matcher.deep_copy()
        return MatcherConstraint(self.grammar, copy, self._num_tokens, self._ends, self._num_consumed)


class Grammars:
    """Compiles grammars for one tokenizer. Safe for use from several threads."""

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int]) -> None:
        """``eos_token_ids`` end an answer; without any, the tokenizer's own end does."""
        self._tokenizer = tokenizer
        self._ends = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Any] = OrderedDict()
        self._vocabulary: Any = None

    @property
    def end_token_id(self) -> int:
        """A token that ends an answer of a given structure. Raises InvalidRequest where there is none."""
        if self._tokenizer.eos_token_id is not None:
            return int(self._tokenizer.eos_token_id)
        if self._ends:
            return min(self._ends)
        raise InvalidRequest("this model has no token that ends an answer, which structured output needs")

    def constraint(self, grammar: Grammar) -> MatcherConstraint:
        """Raises InvalidRequest that says what in the grammar cannot be had."""
        key = msgspec.msgpack.encode(grammar)
        with self._lock:
            vocabulary, matcher = self._vocabulary_of(grammar), self._cache.get(key)
        if matcher is None:  # without the lock: others' grammars are not kept waiting
            matcher = llguidance.LLMatcher(vocabulary, as_lark(grammar), log_level=0)
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
        return MatcherConstraint(grammar, copy, vocabulary.vocab_size, self._ends | {self.end_token_id})

    def _vocabulary_of(self, grammar: Grammar) -> Any:
        if self._vocabulary is None:
            try:
                self._vocabulary = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=len(self._tokenizer), eos_token=self.end_token_id
                )
            except (TypeError, ValueError) as error:
                raise InvalidRequest(
                    f"this model's tokenizer cannot be used for structured output: {error}", param=grammar.param
                ) from error
        return self._vocabulary


def as_lark(grammar: Grammar) -> str:
    """The grammar in llguidance's variant of Lark."""
    rules: list[str] = []
    if grammar.tools:
        rules += _call_rules(grammar.tools)
        calls = _text(CALL_START) + " more" if grammar.must_call or grammar.kind else "opened more"
        again = f"({_text(chr(10) + CALL_START)} call)*" if grammar.parallel else '""'
        rules += [f"more: call {again}"]
        content = "" if grammar.must_call else ("content | " if grammar.kind else "FREE | ")
        rules.insert(0, f"start: {content}{calls}")
        if not grammar.must_call and not grammar.kind:
            marker = CALL_START.replace("\n", "\\n")
            rules += [f"opened[lazy]: /(.|\\n)*{marker}/", f"FREE: /(.|\\n)*/ & ~/(.|\\n)*{marker}(.|\\n)*/"]
    else:
        rules.append("start: content")
    if grammar.kind and not grammar.must_call:
        rules.append(f"content: {_content(grammar)}")
    return "\n".join(rules) + "\n"


def _call_rules(tools: Sequence[ToolSchema]) -> list[str]:
    rules = [f"call: ({' | '.join(f'call_{i}' for i in range(len(tools)))}) {_text(CALL_END)}"]
    for i, tool in enumerate(tools):
        head = _text(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules.append(f'call_{i}: {head} arguments_{i} "}}"')
        schema = json.loads(tool.parameters)
        rules.append(f"arguments_{i}: {_json(schema, is_strict=tool.strict, objects_only=True)}")
    return rules


def _content(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return _json(json.loads(grammar.text), is_strict=grammar.strict)
    if grammar.kind == "regex":
        return f"/{_escape_slashes(grammar.text)}/"
    return " | ".join(_text(choice) for choice in json.loads(grammar.text))


def _json(schema: dict[str, Any], *, is_strict: bool, objects_only: bool = False) -> str:
    """Unless strict, keywords that the engine lacks are not enforced."""
    if objects_only and "type" not in schema and not {"$ref", "anyOf", "allOf", "oneOf"} & set(schema):
        schema = {"type": "object", **schema}
    options = {**_SPACING, "lenient": not is_strict}
    return "%json " + json.dumps({**close_objects(schema), "x-guidance": options}, ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape_slashes(pattern: str) -> str:
    """A regular expression as it stands between two slashes."""
    escaped, out = False, []
    for character in pattern:
        out.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)
