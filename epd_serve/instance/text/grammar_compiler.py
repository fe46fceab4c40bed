"""Compile grammars of requests without delaying other requests."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from epd_serve.engine.sampling.grammar import Grammars, MatcherConstraint, ThinkingConstraint, as_lark
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.request_processor import Place, RequestProcessor
from epd_serve.media.decoder import Compiled, Problem
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.types import Grammar, SamplingParams

#: Estimated compile time, which decides between quick and slow places.
_S_PER_CHARACTER = 1e-5
#: Grammars up to this length without the keywords below compile within milliseconds.
_SHORT_CHARACTERS = 4096
_JOINS = re.compile(r'"(?:allOf|anyOf|oneOf|\$ref|multipleOf|pattern|patternProperties)"')
#: Limit on CPU seconds for the trials of a request.
_TRIALS_CPU_S = 0.5
_TOO_COMPLEX = "structure_too_complex"
#: Number of verdicts to cache.
_MAX_VERDICTS = 1024


class GrammarCompiler:
    """Compiles grammars: long ones first in a disposable process, then all in this process for the tokenizer.

    Compiled grammars cannot move between processes. A grammar that exceeds the limits in the trial process is
    rejected without compiling it here. An optional tool whose schema cannot be enforced accepts any object, unless
    it is strict.
    """

    def __init__(self, grammars: Grammars, processor: RequestProcessor, decoders: DecoderPool) -> None:
        self._grammars = grammars
        self._processor = processor
        self._decoders = decoders
        self._verdicts: dict[bytes, Grammar | InvalidRequest | None] = {}  # None: enforced as it is

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
                    judged = await self._judge(grammar, place)
                    self._verdicts[key] = None if judged is grammar else judged
                    if len(self._verdicts) > _MAX_VERDICTS:
                        del self._verdicts[next(iter(self._verdicts))]
                verdict = self._verdicts[key]
                if isinstance(verdict, InvalidRequest):
                    raise InvalidRequest(verdict.message, param=verdict.param, code=verdict.code)
                grammar = verdict or grammar
            return await place.run(self._grammars.constraint, grammar)

    async def _judge(self, grammar: Grammar, place: Place) -> Grammar | InvalidRequest:
        """Return the grammar to enforce, in which tools may accept any object, or the refusal."""
        parts, tools = _parts(grammar), grammar.tools
        is_risky = any(part.kind == "regex" or _JOINS.search(part.text) for part in parts)
        if not is_risky and sum(len(part.text) for part in parts) <= _SHORT_CHARACTERS:
            try:
                await place.run(self._grammars.constraint, grammar)
                return grammar
            except InvalidRequest:
                pass  # a trial tells which part is wrong
        # schemas of optional, non-strict tools need not be enforced
        may_be_free = not grammar.kind and not grammar.must_call and not any(tool.strict for tool in tools)
        try:
            tried = await self._try(parts if parts == [grammar] else [*parts, grammar], place, _TRIALS_CPU_S)
            if not tried.problems:
                return grammar
            free = set[int]()
            for number, problem in tried.problems.items():
                if number < len(tools) and not (grammar.must_call or parts[number].strict):
                    free.add(number)
                elif number < len(parts):
                    return _refusal(grammar, parts, number, problem)
            relaxed = _free(grammar, free)
            again = tried if not free else await self._try([relaxed], place, _TRIALS_CPU_S - tried.cpu_s)
            for problem in again.problems.values():
                raise InvalidRequest(f"together they are too complex: {problem.message}", code=_TOO_COMPLEX)
            return relaxed
        except InvalidRequest as error:
            if error.code == _TOO_COMPLEX and may_be_free:
                return _free(grammar, range(len(tools)))
            message = error.message if error.param else f"{grammar.param}: {error.message}"
            return InvalidRequest(message, param=error.param or grammar.param, code=error.code)

    async def _try(self, grammars: Sequence[Grammar], place: Place, cpu_s: float) -> Compiled:
        """Compile grammars in a disposable process. Raises InvalidRequest if they exceed the limit."""
        if cpu_s <= 0:
            raise InvalidRequest(f"it takes more than {_TRIALS_CPU_S:g} s to compile", code=_TOO_COMPLEX)
        return await self._decoders.compile(
            await place.run(lambda: list(map(as_lark, grammars))), place, cpu_s=cpu_s
        )


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
