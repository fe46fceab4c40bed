"""Compile grammars of requests without delaying other requests."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from epd_serve.engine.sampling.grammar import Grammars, MatcherConstraint, as_lark
from epd_serve.engine.sampling.json_schema import drop_patterns, patterns_of
from epd_serve.engine.sampling.thinking import ThinkingConstraint
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.request_processor import Place, RequestProcessor
from epd_serve.media.decoder import Problem
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.types import Grammar, SamplingParams

#: Estimated compile time, which decides between quick and slow places.
_S_PER_CHARACTER = 1e-5
#: Grammars up to this length without the keywords below compile within milliseconds.
_SHORT_CHARACTERS = 4096
_JOINS = re.compile(r'"(?:allOf|anyOf|oneOf|\$ref|multipleOf|pattern|patternProperties)"')
#: Limit on CPU seconds for all trials of a request.
_TRIALS_CPU_S = 0.5
_TOO_COMPLEX = "structure_too_complex"
#: Number of verdicts to cache.
_MAX_VERDICTS = 1024
_Verdict = Grammar | InvalidRequest | None


class GrammarCompiler:
    """Compiles grammars: long ones first in a disposable process, then all in this process for the tokenizer.

    Compiled grammars cannot move between processes. A grammar that exceeds the limits in the trial process is
    rejected without compiling it here. Unless a schema is strict, unsupported keywords and patterns are dropped;
    an optional tool whose schema cannot be enforced accepts any object.
    """

    def __init__(self, grammars: Grammars, processor: RequestProcessor, decoders: DecoderPool) -> None:
        self._grammars = grammars
        self._processor = processor
        self._decoders = decoders
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()

    async def constrain(
        self, sampling: SamplingParams, *, is_tried: bool = False
    ) -> tuple[SamplingParams, MatcherConstraint | ThinkingConstraint | None]:
        """Return the sampling parameters with the enforced part of their grammar, and the token constraint.

        ``is_tried`` and errors are as in :meth:`compile`.
        """
        constraint = None
        if sampling.grammar is not None:
            constraint = await self.compile(sampling.grammar, is_tried=is_tried)
            sampling = replace(sampling, grammar=constraint.grammar)
        thinking, budget = sampling.thinking, sampling.thinking_budget
        if thinking is None or (constraint is None and budget is None):
            return sampling, constraint
        ends = () if constraint is None else self._grammars.ends
        return sampling, ThinkingConstraint(thinking, budget, constraint, self._grammars.num_tokens, ends)

    async def compile(self, grammar: Grammar, *, is_tried: bool = False) -> MatcherConstraint:
        """Compile the enforceable part of a grammar, which is ``grammar`` of the returned constraint.

        Args:
            is_tried: another instance has compiled it, so skip the trial, which could fail here.

        Raises InvalidRequest if the grammar is too complex, or with the part that cannot be enforced.
        """
        num_characters = len(grammar.text) + sum(len(tool.parameters) for tool in grammar.tools)
        async with self._processor.place("grammar", _S_PER_CHARACTER * num_characters) as place:
            if not is_tried:
                key = blake3(msgspec.msgpack.encode(grammar)).digest()
                if key not in self._verdicts:
                    self._verdicts[key] = await self._judge(grammar, _Trials(self._decoders, place))
                    if len(self._verdicts) > _MAX_VERDICTS:
                        self._verdicts.popitem(last=False)
                verdict = self._verdicts[key]
                if isinstance(verdict, InvalidRequest):
                    raise InvalidRequest(verdict.message, param=verdict.param, code=verdict.code)
                grammar = verdict or grammar
            return await place.run(self._grammars.constraint, grammar)

    async def _judge(self, grammar: Grammar, trials: _Trials) -> _Verdict:
        """Return the relaxed grammar to enforce, None to enforce the grammar as it is, or the refusal."""
        parts = _parts(grammar)
        is_risky = any(part.kind == "regex" or _JOINS.search(part.text) for part in parts)
        try:
            if not is_risky and sum(len(part.text) for part in parts) <= _SHORT_CHARACTERS:
                try:
                    await trials.place.run(self._grammars.constraint, grammar)
                except InvalidRequest:
                    return await self._relax(grammar, parts, await trials.run(parts), trials)
                return None
            tried = parts if parts == [grammar] else [*parts, grammar]
            problems = await trials.run(tried)
            if not problems:
                return None
            problems.pop(len(parts), None)
            return await self._relax(grammar, parts, problems, trials)
        except InvalidRequest as error:
            # schemas of optional, non-strict tools need not be enforced
            is_free = not grammar.kind and not grammar.must_call and not any(tool.strict for tool in grammar.tools)
            if error.code == _TOO_COMPLEX and is_free:
                return _free(grammar, range(len(grammar.tools)))
            message = error.message if error.param else f"{grammar.param}: {error.message}"
            return InvalidRequest(message, param=error.param or grammar.param, code=error.code)

    async def _relax(
        self, grammar: Grammar, parts: list[Grammar], problems: dict[int, Problem], trials: _Trials
    ) -> Grammar:
        """Remove the parts that cannot be enforced. Raises InvalidRequest if one of them is mandatory."""
        for number, problem in problems.items():
            if parts[number].strict:
                raise _refusal(grammar, parts, number, problem)
        schemas = {number: json.loads(parts[number].text) for number in problems if parts[number].kind == "json"}
        patterns = list({pattern: None for schema in schemas.values() for pattern in patterns_of(schema)})
        texts = [json.dumps({"type": "string", "pattern": pattern}) for pattern in patterns]
        wrong = await trials.run([Grammar(kind="json", text=text) for text in texts])
        unknown = [patterns[number] for number, problem in wrong.items() if not problem.is_complex]
        for number, schema in schemas.items():
            parts[number] = replace(parts[number], text=json.dumps(drop_patterns(schema, unknown)))
        numbers = list(problems)
        again = await trials.run([parts[number] for number in numbers])
        problems = {numbers[position]: problem for position, problem in again.items()}
        for number, problem in problems.items():
            if grammar.must_call or number >= len(grammar.tools):
                raise _refusal(grammar, parts, number, problem)
        tools = [replace(tool, parameters=parts[i].text) for i, tool in enumerate(grammar.tools)]
        text = parts[-1].text if len(parts) > len(tools) else grammar.text
        relaxed = _free(replace(grammar, tools=tools, text=text), problems)
        for problem in (await trials.run([relaxed])).values():
            raise InvalidRequest(f"together they are too complex: {problem.message}", code=_TOO_COMPLEX)
        return relaxed


@dataclass
class _Trials:
    """Trial compilations of one request in disposable processes, which share one limit on CPU time."""

    decoders: DecoderPool
    place: Place
    cpu_s: float = _TRIALS_CPU_S

    async def run(self, grammars: Sequence[Grammar]) -> dict[int, Problem]:
        """Return the problems of grammars, by position. Raises InvalidRequest if they exceed the limit."""
        if not grammars:
            return {}
        if self.cpu_s <= 0:
            raise InvalidRequest(f"it takes more than {_TRIALS_CPU_S:g} s to compile", code=_TOO_COMPLEX)
        texts = await self.place.run(lambda: list(map(as_lark, grammars)))
        compiled = await self.decoders.compile(texts, self.place, cpu_s=self.cpu_s)
        self.cpu_s -= compiled.cpu_s
        return compiled.problems


def _parts(grammar: Grammar) -> list[Grammar]:
    """Return a grammar for each tool's schema, then one for the content if the answer may have any."""
    parts = [Grammar(kind="json", text=t.parameters, strict=t.strict, param="tools") for t in grammar.tools]
    if grammar.kind and not grammar.must_call:
        parts.append(replace(grammar, tools=[]))
    return parts


def _free(grammar: Grammar, numbers: Container[int]) -> Grammar:
    """Let the tools ``numbers`` accept any object."""
    tools = [replace(tool, parameters="{}") if i in numbers else tool for i, tool in enumerate(grammar.tools)]
    return replace(grammar, tools=tools)


def _refusal(grammar: Grammar, parts: list[Grammar], number: int, problem: Problem) -> InvalidRequest:
    part = parts[number]
    is_tool = number < len(grammar.tools)
    what = f"tools: the schema of {grammar.tools[number].name!r}" if is_tool else f"{part.param}: this structure"
    advice = "; remove that, or strict" if part.strict and not problem.is_complex else ""
    return InvalidRequest(
        f"{what} cannot be enforced: {problem.message}{advice}",
        param=part.param,
        code=_TOO_COMPLEX if problem.is_complex else "unsupported_structure",
    )
