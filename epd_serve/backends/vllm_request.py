"""Requests as bodies for vLLM's OpenAI server: for E, P and D, and for the rest of a broken answer."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pybase64
from msgspec.structs import replace
from PIL import Image

from epd_serve.media.video import unpack_frames
from epd_serve.protocol.wire import ChatMessage, MediaRef, OutputOptions, PrefillRequest, PromptOptions
from epd_serve.types import AS_THE_MODEL, SAMPLING_DEFAULTS, Grammar, Modality, SamplingParams

_BYTES_PER_TOKEN = 4
_WARM_UP_PIXELS = 112
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
#: Sampling parameters of the same name in vLLM, with their neutral values.
_SAME: dict[str, Any] = {
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "n": 1,
    **SAMPLING_DEFAULTS,
}
_SEEDS = 1 << 31

Body = dict[str, Any]


# ---------------------------------------------------------------------- one body for each stage


def path_of(request: PrefillRequest) -> str:
    return COMPLETION if request.messages is None else CHAT


def encode_body(model: str, ref: MediaRef, media: bytes) -> Body:
    """Return the body for an instance that encodes one item."""
    message = {"role": "user", "content": [_media_part(ref, media)]}
    return {"model": model, "stream": False, "messages": [message], **_media_options([ref])}


def prompt_body(request: PrefillRequest, media: Sequence[bytes]) -> Body:
    """Return the fields that determine the prompt, the same for P and D."""
    is_chat = request.messages is not None
    body: Body = {
        "model": request.output.model,
        **_media_options(request.items),
        **_prompting(request.prompting, is_chat=is_chat),
        **_given(reasoning_effort=_only_vllm(request).get("reasoning_effort")),
    }
    if request.messages is None:
        body["prompt"] = request.prompt
    else:
        items = iter(zip(request.items, media, strict=True))
        body["messages"] = [_message(message, items) for message in request.messages]
    return body


def prefill_body(request: PrefillRequest, media: Sequence[bytes]) -> Body:
    """Return the body for an instance that computes only the prompt; its single token is dropped.

    vLLM's connectors would not transfer KV if that token ended the answer.
    """
    body = prompt_body(request, media)
    if "tools" in body:
        body["tool_choice"] = "none"  # part of the prompt, but called at D
    limit = "max_tokens" if request.messages is None else "max_completion_tokens"
    return body | {limit: 1, "temperature": 0.0, "ignore_eos": True, "stream": False}


def answer_body(request: PrefillRequest, media: Sequence[bytes]) -> Body:
    """Return the body of the whole request, for the instance that decodes it."""
    body = prompt_body(request, media)
    body |= _sampling(request.sampling, is_chat=request.messages is not None)
    body |= _output(request.output) | _only_vllm(request)
    if "tools" in body:
        body["tool_choice"] = "none"
    if request.sampling.grammar is not None:
        body |= _grammar(request.sampling.grammar, len(body.get("tools", ())))
    return body


def trial_body(model: str, modality: Modality) -> Body:
    """Return a request with a picture or sound to warm up with."""
    file = io.BytesIO()
    if modality == "image":
        Image.new("RGB", (_WARM_UP_PIXELS, _WARM_UP_PIXELS)).save(file, "PNG")
    else:
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, 16_000, 0, "NONE", ""))
            sound.writeframes(bytes(16_000))
    ref = MediaRef(mm_hash="warm-up", width=_WARM_UP_PIXELS, height=_WARM_UP_PIXELS, modality=modality)
    return encode_body(model, ref, file.getvalue()) | {"max_completion_tokens": 1}


# ---------------------------------------------------------------------- facts about a request


def num_copies(sampling: SamplingParams) -> int:
    """Return the number of choices served by one choice of vLLM: all if greedy."""
    return sampling.n if sampling.greedy else 1


def needs_whole_prompt(request: PrefillRequest) -> bool:
    """Return whether D must compute the prompt itself, for its log-probabilities."""
    scores_prompt = request.output.echo and request.sampling.logprobs is not None
    return scores_prompt or "prompt_logprobs" in _only_vllm(request)


def size_of(request: PrefillRequest) -> int:
    """Return the approximate number of a prompt's text tokens."""
    if isinstance(request.prompt, list):
        return len(request.prompt)
    if request.prompt is not None:
        return len(request.prompt) // _BYTES_PER_TOKEN
    parts = (part for message in request.messages or () for part in message.content)
    return sum(len(part.text) for part in parts) // _BYTES_PER_TOKEN


def can_be_replayed(request: PrefillRequest) -> bool:
    """Return whether the events of an answer can carry its tokens without showing them: streams of one choice."""
    sampling, output = request.sampling, request.output
    is_plain = not (output.echo or output.first_index or output.for_vllm)
    return output.stream and sampling.n == 1 and is_plain


def can_continue(request: PrefillRequest) -> bool:
    """Return whether vLLM computes the rest of such an answer apart as it would within the whole.

    It does not if the rest depends on more than the tokens: held back text (``stop``), penalties for repetition,
    the state of a grammar or tool call. Nor does it take prompts with pictures as tokens.
    """
    sampling, prompting = request.sampling, request.prompting
    if not can_be_replayed(request) or request.items:
        return False
    if sampling.stop or sampling.bad_words or sampling.presence_penalty or sampling.frequency_penalty:
        return False
    if sampling.grammar is not None or prompting.tools:
        return False
    return request.messages is not None or sampling.logprobs is None  # their offsets count from the answer's start


# ---------------------------------------------------------------------- the rest of an answer


def rest_of(request: PrefillRequest) -> PrefillRequest:
    """Return the request for the rest of the answer, with lower token limits."""
    sampling, count = request.sampling, len(request.generated)
    if not count:
        return request
    rest = replace(
        sampling,
        max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - count,
        min_tokens=max(0, sampling.min_tokens - count),
        seed=(sampling.seed + count) % _SEEDS,  # do not draw the same numbers twice
    )
    return replace(request, sampling=rest)


def set_prompt_tokens(body: Body, tokens: list[int]) -> None:
    """Replace the prompt of a body by tokens."""
    if "messages" in body:
        body["kv_transfer_params"] = {**body.get("kv_transfer_params", {}), "prompt_token_ids": tokens}
    else:
        body["prompt"] = tokens
        body.pop("add_special_tokens", None)


# ---------------------------------------------------------------------- parts of bodies


def _given(**fields: Any) -> Body:
    """Return the fields that a request sets."""
    return {name: value for name, value in fields.items() if value}


def _only_vllm(request: PrefillRequest) -> Body:
    """Return the request's fields that only vLLM has."""
    return dict(_json(request.output.for_vllm) or {})


def _json(text: str) -> Any:
    return msgspec.json.decode(text) if text else None


def _media_part(ref: MediaRef, media: bytes) -> Body:
    """Return an item as a part of a message, with its hash, by which all instances name the feature."""
    files = [media]
    if ref.modality == "image":
        kind = "image/png" if media.startswith(b"\x89PNG") else "image/jpeg"
    elif ref.modality == "audio":
        kind = "audio/wav"
    elif ref.is_list:
        kind, files = "video/jpeg", unpack_frames(media)
    else:
        kind = "video/mp4"
    url = f"data:{kind};base64,{','.join(pybase64.b64encode(one).decode() for one in files)}"
    return {"type": f"{ref.modality}_url", f"{ref.modality}_url": {"url": url}, "uuid": ref.mm_hash}


def _media_options(refs: Sequence[MediaRef]) -> Body:
    """Return the options of a request's items, which have the same ones, as E, P and D get them."""
    asked = next((ref.sampling for ref in refs if ref.modality == "video"), AS_THE_MODEL)
    frames = {"num_frames": asked.num_frames, "fps": asked.fps}
    frames = {name: value for name, value in frames.items() if value is not None}
    return _given(
        mm_processor_kwargs=_json(next((ref.processing for ref in refs), "")),
        media_io_kwargs={"video": frames} if frames else None,
    )


def _message(message: ChatMessage, items: Iterator[tuple[MediaRef, bytes]]) -> Body:
    content: Any
    if len(message.content) == 1 and message.content[0].type == "text":
        content = message.content[0].text
    elif message.content:
        content = [
            {"type": "text", "text": part.text} if part.type == "text" else _media_part(*next(items))
            for part in message.content
        ]
    else:
        content = None if message.tool_calls else ""
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in message.tool_calls
    ]
    optional = _given(
        tool_calls=calls, tool_call_id=message.tool_call_id, name=message.name, reasoning=message.reasoning
    )
    return {"role": message.role, "content": content, **optional}


def _prompting(options: PromptOptions, *, is_chat: bool) -> Body:
    body = _given(cache_salt=options.cache_salt)
    if options.add_special_tokens is not None:
        body["add_special_tokens"] = options.add_special_tokens
    if is_chat and not options.add_generation_prompt:
        body["add_generation_prompt"] = False
    if is_chat:
        body |= _given(
            continue_final_message=options.continue_final_message,
            tools=_json(options.tools),
            chat_template_kwargs=_json(options.template_kwargs),
        )
    return body


def _sampling(sampling: SamplingParams, *, is_chat: bool) -> Body:
    body: Body = {"seed": sampling.seed}
    for name, neutral in _SAME.items():
        if (value := getattr(sampling, name)) != neutral or name in sampling.neutral:
            body[name] = value
    if num_copies(sampling) > 1:
        del body["n"]
    if sampling.max_tokens is not None:
        body["max_completion_tokens" if is_chat else "max_tokens"] = sampling.max_tokens
    if sampling.logprobs is not None and is_chat:
        body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    elif sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
    return body | _given(
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        include_stop_str_in_output=sampling.include_stop,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
    )


def _output(output: OutputOptions) -> Body:
    body = {"stream": output.stream, **_given(echo=output.echo)}
    if output.stream and (output.include_usage or output.continuous_usage):
        body["stream_options"] = {
            "include_usage": output.include_usage,
            "continuous_usage_stats": output.continuous_usage,
        }
    return body


def _grammar(grammar: Grammar, num_tools: int) -> Body:
    body: Body = {}
    if grammar.kind:
        value = grammar.text if grammar.kind == "regex" else _json(grammar.text)
        body["structured_outputs"] = {grammar.kind: value}
    if grammar.tools:
        body["tool_choice"] = "required" if grammar.must_call else "auto"
        if grammar.must_call and len(grammar.tools) < num_tools:
            body["tool_choice"] = {"type": "function", "function": {"name": grammar.tools[0].name}}
        body["parallel_tool_calls"] = grammar.parallel
    return body
