"""Building blocks of the models of requests: their base, text and number fields, stop strings, unsupported fields.

An option that epd-serve knows and does not act on may be absent, null or hold a value that asks for what happens
anyway; any other value, and an option that is unknown, is refused by name. Labels, which change no token, may hold
anything. Messages may have fields that are unknown: client libraries add some, and send them back.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from epd_serve.errors import InvalidRequest

MAX_STOP_STRINGS = 16
#: Characters of a field's name that are shown, and looked at.
_MAX_NAME = 100
#: What an instance can be told: msgpack knows no longer integers.
WIRE_INTEGERS = 2**63

logger = logging.getLogger(__name__)


class RequestModel(BaseModel):
    """No field but the declared ones, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class MessageModel(RequestModel):
    """A part of a conversation: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _log_ignored(cls, fields: Any) -> Any:
        if logger.isEnabledFor(logging.DEBUG) and isinstance(fields, dict):
            logger.debug("%s: ignored fields: %s", cls.__name__, sorted(fields.keys() - cls.model_fields.keys()))
        return fields


def _as_integer(value: Any) -> Any:
    """Return 8 for 8.0: some languages write every number with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_integers(values: Any) -> Any:
    return (
        [_as_integer(one) for one in values] if isinstance(values, list) and float in map(type, values) else values
    )


Integer = Annotated[int, BeforeValidator(_as_integer)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


#: As in vLLM: requests of another salt share no cached prefix and no encoded picture.
CacheSalt = Annotated[str, Field(min_length=1, max_length=4096)]
StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[
    list[StopString],
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString]),
    Field(max_length=MAX_STOP_STRINGS),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
#: Reading ends at the first that is none.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(_as_integers)]


def explain(refusal: ValidationError, model: type[BaseModel], others: Iterable[str] = ()) -> InvalidRequest:
    """Describe the first fault that pydantic found in a sentence, with ``param`` as in ``messages[0].content``.

    Args:
        model: the model that refused the body.
        others: fields of the body that are known without being the model's.
    """
    error, *more = refusal.errors(include_url=False)
    if error["type"] == "missing":  # where it is there, but misspelt, that is the first thing to say
        beside = (one for one in more if one["type"] == "extra_forbidden" and one["loc"][:-1] == error["loc"][:-1])
        error = next(beside, error)
    if error["type"] == "literal_error" and isinstance(error["input"], dict):  # who takes an object says more
        error = next((one for one in more if one["loc"][: len(error["loc"]) - 1] == error["loc"][:-1]), error)
    param = ""
    unknown = error["type"] == "extra_forbidden"
    for place, step in enumerate(error["loc"], start=1):
        if isinstance(step, int):
            param += f"[{step}]"
            continue
        step = step if len(step) <= _MAX_NAME else step[:_MAX_NAME] + "..."
        if (unknown and place == len(error["loc"])) or (
            step.isidentifier() and step.islower() and step not in ("str", "list", "int", "literal", "dict")
        ):  # the rest names members of a union
            param += f".{step}" if param else step
    if unknown:
        *above, name = error["loc"]
        known = [*_field_names(model, above), *(others if not above else ())]
        meant = get_close_matches(str(name)[:_MAX_NAME], known, n=1)
        advice = f"did you mean {meant[0]!r}?" if meant else "remove it"
        return InvalidRequest(f"unknown field {param!r}; {advice}", param=param, code="unknown_parameter")
    if error["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    value = error["input"]
    if error["loc"][-1:] == ("type",) and isinstance(value, str) and value in OTHER_PARTS:
        return InvalidRequest(f"{param}: {OTHER_PARTS[value]}", param=param, code="unsupported_parameter")
    short = value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 60)
    found = f" (got {value!r})" if short else ""
    message = error["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = message[0].lower() + message[1:]
    if error["type"] in ("model_type", "dict_type"):
        message = "input should be a JSON object"
    return InvalidRequest(f"{param}: {message}{found}", param=param, code="invalid_value")


def _field_names(model: type[BaseModel], place: Iterable[int | str]) -> list[str]:
    """The fields of the objects that may stand at a place, as clients write them."""
    models = [model]
    for step in place:
        if isinstance(step, int):
            continue  # the items of a list are what its annotation names
        fields = [one.model_fields.get(step) or _by_alias(one, step) for one in models]
        inner = [found for field in fields if field is not None for found in _models(field.annotation)]
        models = inner or [one for one in models if one.__name__ == step] or models  # else a member of a union
    return [field.alias or name for one in models for name, field in one.model_fields.items()]


def _by_alias(model: type[BaseModel], alias: str) -> FieldInfo | None:
    return next((field for field in model.model_fields.values() if field.alias == alias), None)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a type names anywhere within."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _models(inner)]


#: Labels of the caller's own; they change no token.
LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "request_id"})

#: Field → (values that ask for what happens anyway, what to do instead).
OLD_TOOLS = "functions are today's tools; send tools and tool_choice instead"
TEXT_ONLY = "answers are text only; leave the field out"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), OLD_TOOLS),
    "function_call": (("none", "auto"), OLD_TOOLS),
    "audio": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "prediction": ((), "predicted outputs are not supported; leave the field out"),
    "web_search_options": ((), "web search is not supported; leave the field out"),
    "store": ((False,), "answers are not stored; leave the field out or send false"),
    "service_tier": (("auto", "default"), "there is one service tier; use 'auto' or leave the field out"),
    "prompt_cache_retention": ((), "the prefix cache keeps no entry by time; leave the field out"),
    "best_of": ((1,), "best_of is not supported; use n and choose among the answers"),
    "suffix": (("",), "completing before a suffix is not supported; leave the field out"),
    "prompt_logprobs": ((), "only engine: vllm has this; send echo and logprobs to /v1/completions"),
    "return_token_ids": ((False,), "only engine: vllm has this; leave the field out"),
    "chat_template": ((), "the model's own chat template is used; leave the field out"),
    "media_io_kwargs": (({},), "goes with the videos of a chat; leave the field out"),
    "mm_processor_kwargs": (({},), "goes with the media of a chat; leave the field out"),
    "cache_salt": ((), "nothing is cached here; leave the field out"),
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
    "max_tool_calls": ((), "the client calls the tools, and counts its calls; leave the field out"),
    "service_tier": (("auto", "default"), "there is one service tier; use 'auto' or leave the field out"),
    "prompt_cache_retention": ((), "the prefix cache keeps no entry by time; leave the field out"),
}

_VIDEO, _AUDIO, _FILE = (
    "send a video to /v1/chat/completions, as a part of type 'video_url'",
    "send a sound to /v1/chat/completions, as a part of type 'input_audio' or 'audio_url'",
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
        neutral: as :data:`NEUTRAL`.
        path: goes before the field's name in the error's ``param``.
        own: fields that are known to mean something all the same.

    Raises InvalidRequest that names the first field which asks for something unsupported.
    """
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


def _same(value: Any, accepted: Any) -> bool:
    """Equality in which JSON's ``true`` is not 1."""
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)
