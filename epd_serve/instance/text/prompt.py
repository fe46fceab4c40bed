"""Turn messages and media facts into token ids, media spans and positions, without pixels."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from epd_serve.cache.block_pool import hash_blocks
from epd_serve.engine.telemetry import StageRates
from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.tokenizer import MARK, Tokenizer
from epd_serve.models.family import TRIED_SECONDS, TRIED_SIZES, Family, picture, sound
from epd_serve.models.generation_config import GenerationConfig
from epd_serve.protocol.wire import MediaRef, PrefillRequest, TokenizeReply, TokenizeRequest
from epd_serve.sched.sequence import Sequence
from epd_serve.types import AS_THE_MODEL, MediaSpan, SamplingParams, VideoFacts

if TYPE_CHECKING:
    from epd_serve.engine.sampling.grammar import Grammars
    from epd_serve.instance.text.chat_template import ChatTemplate
    from epd_serve.instance.text.syllables import SyllableTemplate

#: Minimum token limit of tokenize requests, for models with a smaller context.
MAX_COUNTED_TOKENS = 1 << 17
#: Limit on the characters of a stop string or bad word.
_MAX_WORD_CHARACTERS = 4096
_MAX_LAYOUTS = 256


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Tokenizer, chat template and grammars of one model. Thread-safe.

    Attributes:
        template: renders chats.
        grammars: compiles grammars to token masks; None if the model supports none.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | SyllableTemplate
    grammars: Grammars | None


@dataclass(eq=False)
class PromptProcessor:
    """Converts requests of one model to sequences: chat template, tokenizer, positions. Thread-safe.

    Attributes:
        max_model_len: limit on prompt and answer together, in tokens.
        rates: learns the tokens per character of prompts.
    """

    texts: Texts
    family: Family
    language_model: Any
    max_model_len: int
    block_size: int
    generation: GenerationConfig
    rates: StageRates

    def __post_init__(self) -> None:
        self.tokenizer = self.texts.tokenizer
        self._layouts = MediaLayouts(self.family, self.tokenizer.inner)

    def estimate(self, request: PrefillRequest, num_characters: int) -> int:
        """Estimate the number of prompt tokens; ``num_characters`` comes from :meth:`check_size`."""
        if isinstance(request.prompt, list):
            return len(request.prompt)
        media = sum(self.family.num_tokens(item) for item in request.items)
        return media + round(num_characters * self.rates.tokens_per_character)

    def check_size(self, request: PrefillRequest | TokenizeRequest) -> int:
        """Return the number of characters. Call it before :meth:`process` or :meth:`tokenize`.

        Raises InvalidRequest for a prompt that must exceed the context, without tokenizing it.
        """
        max_tokens, num_characters = self._max_prompt_tokens(request), _num_characters(request)
        if isinstance(request.prompt, list):
            if len(request.prompt) > max(max_tokens, MAX_COUNTED_TOKENS):
                raise InvalidRequest(
                    f"the prompt has {len(request.prompt)} tokens, but the context holds {max_tokens}; shorten it",
                    param="prompt",
                    code="context_length_exceeded",
                )
        else:
            param = "prompt" if request.messages is None else "messages"
            self.tokenizer.check_length(num_characters, max_tokens, param)
        return num_characters

    def _max_prompt_tokens(self, request: PrefillRequest | TokenizeRequest) -> int:
        """Return the token limit of the prompt; tokenize requests may exceed the context."""
        if isinstance(request, TokenizeRequest):
            return max(self.max_model_len, MAX_COUNTED_TOKENS)
        return min(self.max_model_len, request.max_model_len or self.max_model_len)

    def process(self, request: PrefillRequest) -> Sequence:
        """Convert a request, checked by :meth:`check_size`, to a sequence including tokens generated earlier.

        Raises InvalidRequest if the template refuses the chat, the context is too short, or an id is invalid.
        """
        ids, spans = self._encode(request)
        if not ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        if request.generated and request.sampling.n > 1:
            raise InvalidRequest("an answer with several choices cannot be continued", param="generated")
        if not isinstance(request.prompt, list):
            self.rates.prompted(_num_characters(request), len(ids) - sum(span.length for span in spans))
        sampling = self._complete(self.generation.complete(request.sampling))
        thinking = None if request.messages is None else self.texts.template.thinking
        if thinking is not None:
            tail = ids[-1 - len(thinking.after_ids) :]  # as in "<think>\n" or "</think>\n\n"
            if thinking.end_id not in tail:  # else the template turns thinking off
                sampling = replace(sampling, thinking=replace(thinking, is_open=thinking.start_id in tail))
        room, asked = self._max_prompt_tokens(request), sampling.max_tokens
        if request.prompting.bounds_answer and asked is not None:
            asked = min(asked, max(1, room - len(ids)))
        max_tokens = _max_tokens(len(ids), asked, room)
        if self.generation.max_tokens is not None:
            max_tokens = min(max_tokens, self.generation.max_tokens)
        positions, delta = self.family.positions(ids, request.items, self.language_model)
        both_ways: tuple[tuple[int, int], ...] = ()
        if self.family.both_ways_tokens:  # image and video tokens, not audio
            heard = self.family.row_token_ids.get("audio")
            both_ways = tuple((s.start, s.end) for s in spans if ids[s.start] != heard)
        return Sequence(
            request_id=request.request_id,
            prompt_ids=ids,
            sampling=sampling,
            max_tokens=max_tokens,
            positions=positions,
            position_delta=delta,
            spans=self._in_segments(spans, request.items),
            both_ways=both_ways,
            block_hashes=hash_blocks(ids, self.block_size, spans, request.prompting.cache_salt),
            num_sequences=sampling.n,
            hand_off=request.decode_url is not None,
            output_ids=list(request.generated),
        )

    def segments(self, items: AbstractSequence[MediaRef]) -> list[MediaRef]:
        """Return the items, with videos replaced by their segments."""
        parts = (part for item in items for part in item.segments)
        return [part for part in parts if part.segment is None or self.family.num_tokens(part)]

    def _in_segments(
        self, spans: AbstractSequence[MediaSpan], items: AbstractSequence[MediaRef]
    ) -> tuple[MediaSpan, ...]:
        """Convert spans of videos to spans of their segments' features."""
        segments = {item.mm_hash: self.segments([item]) for item in items if item.num_segments > 1}
        found: list[MediaSpan] = []
        for span in spans:
            if span.mm_hash not in segments:
                found.append(span)
                continue
            first = 0
            for part in segments[span.mm_hash]:
                end = first + self.family.num_tokens(part)
                low, high = max(span.offset, first), min(span.offset + span.length, end)
                if low < high:
                    start = span.start + low - span.offset
                    found.append(MediaSpan(start, high - low, part.mm_hash, low - first, span.mm_hash, first))
                first = end
        return tuple(found)

    def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Return the tokens that :meth:`process` would produce. Call :meth:`check_size` first."""
        ids, _ = self._encode(request)
        texts = self.tokenizer.inner.convert_ids_to_tokens(ids) if request.with_texts else None
        return TokenizeReply(tokens=ids, texts=texts)

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of tokens. Raises InvalidRequest for invalid ids or too many tokens."""
        if len(ids) > (most := max(self.max_model_len, MAX_COUNTED_TOKENS)):
            raise InvalidRequest(f"tokens: {len(ids)} exceed the limit of {most}", param="tokens")
        return self.tokenizer.decode(self._check_ids(ids, "tokens"), skip_special_tokens=False)

    def _encode(self, request: PrefillRequest | TokenizeRequest) -> tuple[list[int], tuple[MediaSpan, ...]]:
        options = request.prompting
        if request.messages is not None:
            param, with_special = "messages", bool(options.add_special_tokens)
            text = self.texts.template.render(request.messages, options)
        elif isinstance(request.prompt, str):
            param, with_special, text = "prompt", options.add_special_tokens is not False, request.prompt
        else:
            return self._expand(self._check_ids(request.prompt or [], "prompt"), request.items)
        self.tokenizer.check_length(len(text), self._max_prompt_tokens(request), param)
        first, *others = text.split(MARK) if request.messages is not None else [text]
        ids = self.tokenizer.encode(first, add_special_tokens=with_special)
        for piece in others:
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return self._expand(ids, request.items)

    def _complete(self, sampling: SamplingParams) -> SamplingParams:
        """Add token ids of bad words, and the end token of a structured answer."""
        if sampling.logit_bias:
            self._check_ids(list(sampling.logit_bias), "logit_bias")
        if sampling.allowed_token_ids:
            self._check_ids(list(sampling.allowed_token_ids), "allowed_token_ids")
        for name, words in (("stop", sampling.stop), ("bad_words", sampling.bad_words)):
            if any(len(word) > _MAX_WORD_CHARACTERS for word in words):
                raise InvalidRequest(f"{name}: a text has at most {_MAX_WORD_CHARACTERS} characters", param=name)
        if sampling.bad_words:
            spellings = {
                tuple(self.tokenizer.encode(spelt, add_special_tokens=False))
                for word in sampling.bad_words
                for spelt in (word, " " + word.lstrip())
            }
            sampling = replace(sampling, bad_word_ids=tuple(sorted(filter(None, spellings))))
        if sampling.grammar is not None:
            assert self.texts.grammars is not None, "requests with grammars are refused earlier"
            ends = (*sampling.stop_token_ids, self.texts.grammars.end_token_id)
            grammar = replace(sampling.grammar, format=self.texts.template.tool_format)
            sampling = replace(sampling, stop_token_ids=ends, grammar=grammar)
        return sampling

    def _check_ids(self, ids: list[int], param: str) -> list[int]:
        size = len(self.tokenizer.inner)
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"{param}: token id {wrong} is outside the vocabulary of {size} tokens", param=param
            )
        return ids

    def _expand(
        self, ids: list[int], items: AbstractSequence[MediaRef]
    ) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """Replace each item's single placeholder from the template with the item's tokens."""
        if not items:
            return ids, ()  # without media, a placeholder is an ordinary token
        placeholders = {token: kind for kind, token in self.family.token_ids.items()}
        shown = [placeholders[token] for token in ids if token in placeholders]
        if shown != (sent := [item.modality for item in items]):
            raise InvalidRequest(
                f"the model's chat template shows {len(shown)} media items ({_listed(shown)}) of the {len(sent)} "
                f"sent ({_listed(sent)})",
                param="messages",
            )
        expanded: list[int] = []
        spans: list[MediaSpan] = []
        remaining = iter(items)
        for token in ids:
            if token not in placeholders:
                expanded.append(token)
                continue
            item = next(remaining)
            layout = self._layouts.of(item)
            start = len(expanded)
            for begin, length, offset in layout.runs:
                spans.append(MediaSpan(start + begin, length, item.mm_hash, offset))
            expanded += layout.ids
        return expanded, tuple(spans)


def _listed(modalities: AbstractSequence[str]) -> str:
    """List the first modalities."""
    return ", ".join(modalities[:8]) + (", ..." if len(modalities) > 8 else "") or "none"


def _num_characters(request: PrefillRequest | TokenizeRequest) -> int:
    messages, options = request.messages or (), request.prompting
    texts = [part.text for message in messages for part in message.content]
    calls = [call.arguments for message in messages for call in message.tool_calls]
    return sum(map(len, (*texts, *calls, options.tools, options.template_kwargs, request.prompt or "")))


def _max_tokens(num_prompt_tokens: int, asked: int | None, max_model_len: int) -> int:
    room = max_model_len - num_prompt_tokens
    if room < (1 if asked is None else min(asked, 1)):
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens, including media, but the context holds "
            f"{max_model_len}; shorten it",
            param="messages",
            code="context_length_exceeded",
        )
    if asked is not None and asked > room:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens, so max_tokens can be at most {room}, not {asked}: "
            f"the context holds {max_model_len}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return room if asked is None else asked


@dataclass(frozen=True, slots=True)
class Layout:
    """Tokens of one item, and the runs (start, length, offset) of tokens that take rows of its feature."""

    ids: list[int]
    runs: list[tuple[int, int, int]]


class MediaLayouts:
    """Layouts of one model's media, with a cache. Thread-safe."""

    def __init__(self, family: Family, tokenizer: Any) -> None:
        """Check the tokenizer. Raises ValueError if it tokenizes an item differently in a prompt than alone."""
        self._family = family
        self._tokenizer = tokenizer
        self._of_facts = lru_cache(_MAX_LAYOUTS)(self._new)
        for size in TRIED_SIZES:
            if "image" in family.token_ids:
                self._check(picture(size))
            if "video" in family.token_ids:
                self._check(MediaRef.of_video(VideoFacts(*size, 100, 12.5), AS_THE_MODEL))
        if family.audio is not None:
            for seconds in TRIED_SECONDS:
                self._check(sound(seconds, family.audio.rate))

    def of(self, item: MediaRef) -> Layout:
        """Return the layout of an item. Raises InvalidRequest if the model does not support the item."""
        return self._of_facts(replace(item, mm_hash="", num_segments=1))

    def _new(self, item: MediaRef) -> Layout:
        ids: list[int] = []
        runs: list[tuple[int, int, int]] = []
        offset = 0
        for part in self._family.parts_of(item):
            if isinstance(part, str):
                ids += self._tokenizer.encode(part, add_special_tokens=False)
                continue
            runs.append((len(ids), part, offset))
            ids += [self._family.row_token_ids[item.modality]] * part
            offset += part
        return Layout(ids, runs)

    def _check(self, item: MediaRef) -> None:
        read = partial(self._tokenizer.encode, add_special_tokens=False)
        token: str = self._tokenizer.convert_ids_to_tokens(self._family.row_token_ids[item.modality])
        parts = self._family.parts_of(item)
        text = "".join(part if isinstance(part, str) else token * part for part in parts)
        if read(f"a {text} b") != [*read("a "), *self.of(item).ids, *read(" b")]:
            raise ValueError(
                f"the tokenizer tokenizes a media item, {text[:80]!r} ..., differently within a text than alone; "
                "copy the tokenizer's files from the original model"
            )
