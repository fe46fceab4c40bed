"""Building blocks of request models: base classes, number and text fields, unsupported options, errors.

Requests reject unknown fields and suggest the right name. Messages accept them, since client libraries send back
fields of earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from itertools import chain
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from epd_serve.errors import InvalidRequest

MAX_STOP_STRINGS = 16
#: Characters of a field name that an error shows.
_MAX_NAME = 100
#: msgpack integers must be below this.
WIRE_INTEGERS = 2**63

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_LABEL = "Label for the caller's own use; does not affect the answer."


#: Bodies are parsed and echoed recursively, so their depth is limited.
MAX_DEPTH = 200


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a body. Raises InvalidRequest with the position of the first JSON error."""
    if body[:3] == b"\xef\xbb\xbf":  # a byte order mark (RFC 8259, section 8.1)
        body = body[3:]
    try:
        found: dict[str, Any] = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a valid JSON object: {error}", code="invalid_json") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep([found]):
        raise InvalidRequest(f"the body has more than {MAX_DEPTH} nesting levels; flatten it", code="invalid_json")
    return found


def _is_deep(level: list[Any]) -> bool:
    for _ in range(MAX_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not inner:
            return False
        level = list(chain.from_iterable(inner))
    return True


class RequestModel(BaseModel):
    """Base model that rejects undeclared fields and does not convert types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Body(RequestModel):
    """Base of request bodies. A null field counts as absent."""

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        """Decode and validate a body. Raises InvalidRequest with the wrong field in ``param``."""
        try:
            return cls.model_validate(cls._decode(body))
        except ValidationError as error:
            raise explain(error, cls) from error

    @classmethod
    def _decode(cls, body: bytes | bytearray) -> dict[str, Any]:
        return decode_object(body)

    def _check(self) -> None:
        """Check rules that involve several fields. Raises InvalidRequest."""

    @model_validator(mode="after")
    def _validate(self) -> Self:
        self._check()
        return self


class MessageModel(RequestModel):
    """Base of conversation parts. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


def broken_rule(message: str, field: str = "", code: str = "invalid_value") -> PydanticCustomError:
    """Return an error for a validator to raise about ``field`` of its model."""
    return PydanticCustomError("broken_rule", "{message}", {"message": message, "field": field, "code": code})


def _as_integer(value: Any) -> Any:
    """Return 8 for 8.0, since some languages write every number as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_integers(values: Any) -> Any:
    return (
        [_as_integer(one) for one in values] if isinstance(values, list) and float in map(type, values) else values
    )


def text_or(kind: Any, wrap: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that also accepts a text, and wraps it; ``kind`` is the other type."""
    return BeforeValidator(
        lambda value: wrap(value) if isinstance(value, str) else value, json_schema_input_type=str | kind
    )


#: Accepts 8.0 as 8. It follows the limits of an integer: before them, pydantic omits them from the JSON Schema.
WHOLE = BeforeValidator(_as_integer)
StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[
    list[StopString],
    text_or(list[StopString], lambda text: [text]),
    Field(max_length=MAX_STOP_STRINGS),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(_as_integers)]


def explain(refusal: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """Convert a validation error of ``model``, with a ``param`` such as ``messages[0].content``."""
    error = _first_fault(refusal)
    kind, option = error["type"], str(error["loc"][0]) if error["loc"] else ""
    if any(NoEffect in base.__bases__ and option in base.__annotations__ for base in model.__mro__):
        advice = model.model_fields[option].description
        return InvalidRequest(f"{option}: {advice}", param=option, code="unsupported_parameter")
    param = _param(error)
    if kind == "broken_rule":
        rule = error["ctx"]
        param += f".{rule['field']}" if rule["field"] else ""
        return InvalidRequest(f"{param}: {rule['message']}", param=param, code=rule["code"])
    if kind == "extra_forbidden":
        meant = get_close_matches(str(error["loc"][-1])[:_MAX_NAME], _names(model), n=1)
        advice = f"did you mean {meant[0]!r}?" if meant else "remove it"
        return InvalidRequest(f"unknown field {param!r}; {advice}", param=param, code="unknown_parameter")
    if kind == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    value, message = error["input"], error["msg"].replace(" after validation", "")
    if kind in ("model_type", "dict_type"):
        message = "input should be a JSON object"
    is_short = value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 60)
    found = f" (got {value!r})" if is_short else ""
    return InvalidRequest(f"{param}: {message[0].lower()}{message[1:]}{found}", param=param, code="invalid_value")


def _first_fault(refusal: ValidationError) -> ErrorDetails:
    """Return the most helpful error for the caller."""
    error, *more = refusal.errors(include_url=False)
    if error["type"] == "missing":  # a misspelt field or a wrong type explains a missing field
        causes = ("extra_forbidden", "literal_error")
        found = (one for one in more if one["type"] in causes and one["loc"][:-1] == error["loc"][:-1])
        error = next(found, error)
    if error["type"] == "literal_error" and isinstance(error["input"], dict):
        # the union member that accepts an object gives the better error
        error = next((one for one in more if one["loc"][: len(error["loc"]) - 1] == error["loc"][:-1]), error)
    return error


def _param(error: ErrorDetails) -> str:
    """Return the path of the wrong field, without pydantic's names of union members."""
    param = ""
    for place, step in enumerate(error["loc"], start=1):
        if isinstance(step, int):
            param += f"[{step}]"
            continue
        step = step if len(step) <= _MAX_NAME else step[:_MAX_NAME] + "..."
        if (error["type"] == "extra_forbidden" and place == len(error["loc"])) or (
            step.isidentifier() and step.islower() and step not in ("str", "list", "int", "literal", "dict")
        ):
            param += f".{step}" if param else step
    return param


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Return the field names of a model and its nested models, as clients write them."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        found |= {field.alias or name}.union(*map(_names, _models(field.annotation)))
    return frozenset(found)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return all models that occur in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _models(inner)]


class Labels(RequestModel):
    """Labels for the caller's own use, which do not affect the answer."""

    user: Any = Field(None, description=_LABEL)
    metadata: Any = Field(None, description=_LABEL)
    safety_identifier: Any = Field(None, description=_LABEL)
    prompt_cache_key: Any = Field(None, description=_LABEL)
    request_id: Any = Field(None, description=_LABEL)


class NoEffect(RequestModel):
    """Base of unsupported options, which must be absent, null or the default.

    The description of each field says what to do instead.
    """


class CommonNoEffect(NoEffect):
    """Unsupported options that all requests share."""

    store: Literal[False] | None = Field(None, description="Answers are not stored; send the whole conversation.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="Only one service tier exists.")
    prompt_cache_retention: None = Field(None, description="Prefix cache entries do not expire by time.")


class ChatNoEffect(NoEffect):
    """Unsupported options of chats and completions."""

    functions: list[Any] | None = Field(None, max_length=0, description="Send tools instead.")
    function_call: Literal["none", "auto"] | None = Field(None, description="Send tool_choice instead.")
    audio: None = Field(None, description="Answers are text only.")
    modalities: list[Literal["text"]] | None = Field(None, description="Answers are text only.")
    prediction: None = Field(None, description="Predicted outputs are not supported.")
    web_search_options: None = Field(None, description="Web search is not supported.")
    best_of: Literal[1] | None = Field(None, description="Send n and pick the best answer yourself.")
    suffix: Literal[""] | None = Field(None, description="Completing before a suffix is not supported.")
    chat_template: None = Field(None, description="The model's own chat template is used.")
    guided_json: None = Field(None, description="Send response_format or structured_outputs.json instead.")
    guided_regex: None = Field(None, description="Send structured_outputs.regex instead.")
    guided_choice: None = Field(None, description="Send structured_outputs.choice instead.")
