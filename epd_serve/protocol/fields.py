"""Building blocks of the models of requests: their base, text and number fields, stop strings."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.protocol import strict_json
from epd_serve.protocol.unsupported import OTHER_PARTS

MAX_STOP_STRINGS = 16
#: Characters of a field's name that are shown, and looked at.
_MAX_NAME = 100
#: What an instance can be told: msgpack knows no longer integers.
WIRE_INTEGERS = 2**63


class RequestModel(BaseModel):
    """No field but the declared ones, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[
    list[StopString],
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString]),
    Field(max_length=MAX_STOP_STRINGS),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
#: Reading ends at the first that is none.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a JSON object. Raises InvalidRequest, with the place where the text stops being one."""
    try:
        fields = strict_json.decode(body)
    except strict_json.JSONTooLarge as error:
        raise TooLarge(f"the body is too much JSON: {error}") from error
    except strict_json.JSONRefused as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest('the body must be a JSON object, such as {"messages": [...]}', code="invalid_json")
    return fields


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
    message = error["msg"].removeprefix("Value error, ")
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
