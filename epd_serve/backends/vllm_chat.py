"""Bodies for vLLM's OpenAI server."""

from __future__ import annotations

import io
import secrets
import wave
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pybase64
from PIL import Image

from epd_serve.media.video import unpack_frames
from epd_serve.protocol.wire import ChatMessage, MediaRef, OutputOptions, PrefillRequest, PromptOptions
from epd_serve.types import AS_THE_MODEL, SAMPLING_DEFAULTS, Grammar, Modality, SamplingParams

BYTES_PER_TOKEN = 4
WARM_UP_PIXELS = 112
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
#: Sampling parameters of the same name in vLLM, with their neutral values.
_SAME: dict[str, Any] = {
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "n": 1,
    **SAMPLING_DEFAULTS,
}

#: Fields only for vLLM that change the prompt; the others are for D.
_OF_PROMPT = frozenset({"reasoning_effort"})

Body = dict[str, Any]


def path_of(request: PrefillRequest) -> str:
    return COMPLETION if request.messages is None else CHAT


def prompt_body(request: PrefillRequest, media: Sequence[bytes]) -> Body:
    """Return the fields that determine the prompt, the same for P and D."""
    body: Body = {
        "model": request.output.model,
        **media_options(request.items),
        **_prompting(request.prompting, is_chat=request.messages is not None),
        **{name: value for name, value in only_vllm(request).items() if name in _OF_PROMPT},
    }
    if request.messages is None:
        body["prompt"] = request.prompt
    else:
        items = iter(zip(request.items, media, strict=True))
        body["messages"] = [_message(message, items) for message in request.messages]
    return body


def answer_body(request: PrefillRequest, media: Sequence[bytes]) -> Body:
    """Return the body of the whole request, for the instance that decodes it."""
    body = prompt_body(request, media)
    body |= _sampling(request.sampling, is_chat=request.messages is not None)
    body |= _output(request.output) | only_vllm(request)
    if "tools" in body:
        body["tool_choice"] = "none"
    if request.sampling.grammar is not None:
        body |= _grammar(request.sampling.grammar, len(body.get("tools", ())))
    return body


def only_vllm(request: PrefillRequest) -> Body:
    """Return the request's fields that only vLLM has."""
    fields: Body = msgspec.json.decode(request.output.for_vllm) if request.output.for_vllm else {}
    return fields


def needs_whole_prompt(request: PrefillRequest) -> bool:
    """Return whether D must compute the prompt itself, for its log-probabilities."""
    scores_prompt = request.output.echo and request.sampling.logprobs is not None
    return scores_prompt or "prompt_logprobs" in only_vllm(request)


def prefill_body(request: PrefillRequest, media: Sequence[bytes]) -> Body:
    """Return the body for an instance that computes only the prompt; its single token is dropped.

    vLLM's connectors would not transfer KV if that token ended the answer.
    """
    body = prompt_body(request, media)
    if "tools" in body:
        body["tool_choice"] = "none"  # part of the prompt, but called at D
    limit = "max_tokens" if request.messages is None else "max_completion_tokens"
    return body | {limit: 1, "temperature": 0.0, "ignore_eos": True, "stream": False}


def encode_body(model: str, ref: MediaRef, media: bytes) -> Body:
    """Return the body for an instance that encodes one item."""
    message = {"role": "user", "content": [media_part(ref, media)]}
    return {"model": model, "stream": False, "messages": [message], **media_options([ref])}


def media_part(ref: MediaRef, media: bytes) -> Body:
    """Return an item as a part of a message, with its hash, by which all instances name the feature."""
    kind = f"{ref.modality}_url"
    return {"type": kind, kind: {"url": _data_url(ref, media)}, "uuid": ref.mm_hash}


def _data_url(ref: MediaRef, media: bytes) -> str:
    if ref.modality == "image":
        kind = "image/png" if media.startswith(b"\x89PNG") else "image/jpeg"
    elif ref.modality == "audio":
        kind = "audio/wav"
    else:
        kind = "video/jpeg" if ref.is_list else "video/mp4"
    files = unpack_frames(media) if ref.is_list else [media]
    return f"data:{kind};base64,{','.join(pybase64.b64encode(one).decode() for one in files)}"


def media_options(refs: Sequence[MediaRef]) -> Body:
    """Return the options of a request's items, which have the same ones, as E, P and D get them."""
    asked = next((ref.sampling for ref in refs if ref.modality == "video"), AS_THE_MODEL)
    body: Body = {}
    if processing := next((ref.processing for ref in refs), ""):
        body["mm_processor_kwargs"] = msgspec.json.decode(processing)
    frames = {"num_frames": asked.num_frames, "fps": asked.fps}
    frames = {name: value for name, value in frames.items() if value is not None}
    if frames:
        body["media_io_kwargs"] = {"video": frames}
    return body


def _message(message: ChatMessage, items: Iterator[tuple[MediaRef, bytes]]) -> Body:
    body: Body = {"role": message.role}
    if len(message.content) == 1 and message.content[0].type == "text":
        body["content"] = message.content[0].text
    elif message.content:
        body["content"] = [
            {"type": "text", "text": part.text} if part.type == "text" else media_part(*next(items))
            for part in message.content
        ]
    else:
        body["content"] = None if message.tool_calls else ""
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning": message.reasoning}
    return body | {name: value for name, value in optional.items() if value}


def _prompting(options: PromptOptions, *, is_chat: bool) -> Body:
    body: Body = {}
    if options.add_special_tokens is not None:
        body["add_special_tokens"] = options.add_special_tokens
    if options.cache_salt:
        body["cache_salt"] = options.cache_salt
    if not is_chat:
        return body
    if not options.add_generation_prompt:
        body["add_generation_prompt"] = False
    if options.continue_final_message:
        body["continue_final_message"] = True
    if options.tools:
        body["tools"] = msgspec.json.decode(options.tools)
    if options.template_kwargs:
        body["chat_template_kwargs"] = msgspec.json.decode(options.template_kwargs)
    return body


def num_copies(sampling: SamplingParams) -> int:
    """Return the number of choices served by one choice of vLLM: all if greedy."""
    return sampling.n if sampling.greedy else 1


def _sampling(sampling: SamplingParams, *, is_chat: bool) -> Body:
    body: Body = {"seed": sampling.seed}
    for name, neutral in _SAME.items():
        if (value := getattr(sampling, name)) != neutral or name in sampling.neutral:
            body[name] = value
    if num_copies(sampling) > 1:
        del body["n"]
    if sampling.max_tokens is not None:
        body["max_completion_tokens" if is_chat else "max_tokens"] = sampling.max_tokens
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.include_stop:
        body["include_stop_str_in_output"] = True
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.bad_words:
        body["bad_words"] = list(sampling.bad_words)
    if sampling.logprobs is not None:
        body |= (
            {"logprobs": True, "top_logprobs": sampling.logprobs} if is_chat else {"logprobs": sampling.logprobs}
        )
    return body


def _output(output: OutputOptions) -> Body:
    body: Body = {"stream": output.stream}
    if output.stream and (output.include_usage or output.continuous_usage):
        body["stream_options"] = {
            "include_usage": output.include_usage,
            "continuous_usage_stats": output.continuous_usage,
        }
    if output.echo:
        body["echo"] = True
    return body


def _grammar(grammar: Grammar, num_tools: int) -> Body:
    body: Body = {}
    if grammar.kind:
        value = grammar.text if grammar.kind == "regex" else msgspec.json.decode(grammar.text)
        body["structured_outputs"] = {grammar.kind: value}
    if grammar.tools:
        body["tool_choice"] = "required" if grammar.must_call else "auto"
        if grammar.must_call and len(grammar.tools) < num_tools:
            body["tool_choice"] = {"type": "function", "function": {"name": grammar.tools[0].name}}
        body["parallel_tool_calls"] = grammar.parallel
    return body


def size_of(request: PrefillRequest) -> int:
    """Return the approximate number of a prompt's text tokens."""
    if isinstance(request.prompt, list):
        return len(request.prompt)
    if request.prompt is not None:
        return len(request.prompt) // BYTES_PER_TOKEN
    parts = (part for message in request.messages or () for part in message.content)
    return sum(len(part.text) for part in parts) // BYTES_PER_TOKEN


def trial_body(model: str, modality: Modality, *, is_new: bool) -> Body:
    """Return a request with a picture or sound to warm up with, which the store neither keeps nor counts.

    ``is_new``: whether it differs from earlier ones.
    """
    file = io.BytesIO()
    if modality == "image":
        Image.new("RGB", (WARM_UP_PIXELS, WARM_UP_PIXELS)).save(file, "PNG")
    else:
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, 16_000, 0, "NONE", ""))
            sound.writeframes(bytes(16_000))
    name = secrets.token_hex(32) if is_new else "warm-up"
    ref = MediaRef(mm_hash=name, width=WARM_UP_PIXELS, height=WARM_UP_PIXELS, modality=modality)
    body = encode_body(model, ref, file.getvalue())
    return body | {"max_completion_tokens": 1, "ec_transfer_params": {"trial": True}}
