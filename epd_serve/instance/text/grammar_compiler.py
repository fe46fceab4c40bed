"""Grammars of requests, compiled so that none of them holds up another's request."""

from __future__ import annotations

import re
from collections import OrderedDict

from blake3 import blake3

from epd_serve.engine.sampling.grammar import Grammars, MatcherConstraint, as_lark
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.request_processor import Place, RequestProcessor
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.types import Grammar

#: An estimate, for the order in which grammars get their turn.
_S_PER_CHARACTER = 1e-5
#: A grammar that is no longer, and joins nothing, takes some milliseconds.
_SHORT_CHARACTERS = 4096
_JOINS = re.compile(r'"(?:allOf|anyOf|oneOf|\$ref|multipleOf|pattern|patternProperties)"')
#: Verdicts that are kept.
_MAX_VERDICTS = 1024


class GrammarCompiler:
    """Compiles a long grammar in a process that may be ended first, and then for the requests' tokenizer.

    What is compiled cannot be handed from one process to another. A grammar that takes too long there is refused
    here without being tried again.
    """

    def __init__(self, grammars: Grammars, processor: RequestProcessor, decoders: DecoderPool) -> None:
        self._grammars = grammars
        self._processor = processor
        self._decoders = decoders
        self._verdicts: OrderedDict[bytes, tuple[str, str | None]] = OrderedDict()

    async def compile(self, grammar: Grammar, *, is_tried: bool = False) -> MatcherConstraint:
        """Raises InvalidRequest for a grammar that takes too much, or says what in it cannot be had.

        Args:
            is_tried: another instance has compiled it; one that just passed there must not fail here.
        """
        texts = (grammar.text, *(tool.parameters for tool in grammar.tools))
        num_characters = sum(map(len, texts))
        async with self._processor.place("grammar", _S_PER_CHARACTER * num_characters) as place:
            if not is_tried and (num_characters > _SHORT_CHARACTERS or any(map(_JOINS.search, texts))):
                await self._try(grammar, place)
            return await place.run(self._grammars.constraint, grammar)

    async def _try(self, grammar: Grammar, place: Place) -> None:
        """Raises InvalidRequest for a grammar that another process refuses, or has refused."""
        key, text = await place.run(_keyed, grammar)
        if key not in self._verdicts:
            verdict: tuple[str, str | None] = ("", None)
            try:
                await self._decoders.compiled(text, place)
            except InvalidRequest as error:
                verdict = (error.message, error.code)
            self._verdicts[key] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        message, code = self._verdicts[key]
        if message:
            raise InvalidRequest(
                f"{grammar.param}: this structure is not supported: {message}", param=grammar.param, code=code
            )


def _keyed(grammar: Grammar) -> tuple[bytes, str]:
    text = as_lark(grammar)
    return blake3(text.encode()).digest(), text
