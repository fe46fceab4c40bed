"""Fields of the OpenAI and vLLM APIs that epd-serve knows but does not act on.

Nothing is silently ignored: such a field may be absent, null or hold a value that asks for what happens anyway;
any other value is refused by name. Only pure labels, which change no token, may hold anything.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from epd_serve.errors import InvalidRequest

#: Labels of the caller's own; they change no token.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "request_id"})

#: Field → (values that ask for what happens anyway, what to do instead).
_TOOLS = "functions are today's tools; send tools and tool_choice instead"
_TEXT_ONLY = "answers are text only; leave the field out"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "audio": ((), _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "prediction": ((), "predicted outputs are not supported; leave the field out"),
    "reasoning_effort": (("none",), "the models served here have no reasoning effort; leave the field out"),
    "verbosity": (("medium",), "verbosity cannot be set; ask for it in the prompt"),
    "web_search_options": ((), "web search is not supported; leave the field out"),
    "store": ((False,), "answers are not stored; leave the field out or send false"),
    "service_tier": (("auto", "default"), "there is one service tier; use 'auto' or leave the field out"),
    "prompt_cache_retention": ((), "the prefix cache keeps no entry by time; leave the field out"),
    "best_of": ((1,), "best_of is not supported; use n and choose among the answers"),
    "suffix": (("",), "completing before a suffix is not supported; leave the field out"),
    "use_beam_search": ((False,), "beam search is not supported; use temperature 0 for the greedy answer"),
    "length_penalty": ((1, 1.0), "beam search is not supported; leave the field out"),
    "early_stopping": ((False,), "beam search is not supported; leave the field out"),
    "spaces_between_special_tokens": ((True,), "this cannot be changed; leave the field out"),
    "prompt_logprobs": ((), "only engine: vllm has this; send echo and logprobs to /v1/completions"),
    "return_token_ids": ((False,), "only engine: vllm has this; leave the field out"),
    "chat_template": ((), "the model's own chat template is used; leave the field out"),
    "mm_processor_kwargs": (
        ({},),
        "what is kept of a picture is named by its content alone, so that all requests share the processor's "
        "arguments; leave the field out (with engine: vllm they are set in instances.engine_args)",
    ),
    "guided_grammar": ((), "grammars differ between engines; send a JSON schema, a regular expression or choices"),
    "cache_salt": ((), "the prefix cache cannot be salted; leave the field out"),
}

#: The same for ``/v1/responses``.
_NOT_STORED = "answers are not stored; send the conversation as input"
RESPONSES_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), _NOT_STORED),
    "previous_response_id": ((), _NOT_STORED),
    "conversation": ((), _NOT_STORED),
    "prompt": ((), "prompts are not stored; send instructions and input"),
    "background": ((False,), "answers are not stored, so none can be fetched later; leave the field out"),
    "truncation": (("disabled",), "prompts are never cut; shorten the input"),
    "reasoning": (
        ({}, {"effort": "none"}),
        "the models served here have no reasoning effort; leave the field out",
    ),
    "max_tool_calls": ((), "the client calls the tools, and counts its calls; leave the field out"),
    "service_tier": (("auto", "default"), "there is one service tier; use 'auto' or leave the field out"),
    "prompt_cache_retention": ((), "the prefix cache keeps no entry by time; leave the field out"),
}

#: The same for a message of a chat.
MESSAGE_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "refusal": ((), "refusals are not supported in the history; send the text as content"),
    "function_call": ((), _TOOLS),
    "audio": ((), _TEXT_ONLY),
    "annotations": (([],), "annotations are not supported in the history; leave the field out"),
}
_OF_MESSAGES = MESSAGE_NEUTRAL.keys()

_VIDEO, _AUDIO, _FILE = (
    "video is not supported: the engines native and vllm are given text and images here; send some of its frames "
    "as image_url parts",
    "audio is not supported: the engines native and vllm are given text and images here; send what is said as "
    "text",
    "files are not supported; send their text, or pictures of their pages as image_url parts",
)
#: Types of a message's parts that other servers take, and what to send instead.
OTHER_PARTS = {
    **dict.fromkeys(("video_url", "video", "input_video"), _VIDEO),
    **dict.fromkeys(("audio_url", "audio", "input_audio"), _AUDIO),
    **dict.fromkeys(("file", "input_file"), _FILE),
}


def drop_neutral(
    fields: dict[str, Any],
    neutral: Mapping[str, tuple[tuple[Any, ...], str]],
    path: str = "",
    *,
    own: Container[str] = (),
) -> dict[str, Any]:
    """The fields without those that are known and ask for nothing special.

    Args:
        fields: a JSON object as decoded.
        neutral: NEUTRAL or MESSAGE_NEUTRAL.
        path: goes before the field's name in the error's ``param``.
        own: fields that are known to mean something all the same.

    Raises InvalidRequest that names the first field which asks for something unsupported.
    """
    if neutral.keys().isdisjoint(fields):
        return fields
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in neutral and name not in own:
            accepted, advice = neutral[name]
            if value is not None and not any(_same(value, one) for one in accepted):
                raise InvalidRequest(
                    f"{path}{name}: {advice}", param=f"{path}{name}", code="unsupported_parameter"
                )
        else:
            kept[name] = value
    return kept


def drop_message_neutral(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with :func:`drop_neutral` applied to each of a body's messages."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    if all(not isinstance(message, dict) or _OF_MESSAGES.isdisjoint(message) for message in messages):
        return fields
    kept = [
        drop_neutral(message, MESSAGE_NEUTRAL, f"messages[{index}].") if isinstance(message, dict) else message
        for index, message in enumerate(messages)
    ]
    return {**fields, "messages": kept}


def _same(value: Any, accepted: Any) -> bool:
    """Equality in which JSON's ``true`` is not 1."""
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)
