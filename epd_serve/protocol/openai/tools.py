"""Tools and structured output: request fields, and the grammar they require."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Field

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.fields import RequestModel
from epd_serve.types import Grammar, ToolSchema

MAX_TOOLS = 128
MAX_CHOICES = 1000
#: Maximum characters of a regular expression.
MAX_REGEX = 65_536
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="Name.")]
#: JSON Schema, not validated here; the instance enforces the keywords that its grammar engine supports.
Schema = dict[str, Any]


class FunctionDefinition(RequestModel):
    """A function. Calls follow ``parameters``; ``strict`` rejects parameters that cannot be fully enforced."""

    name: FunctionName
    description: str | None = Field(None, description="Description of the function, for the model.")
    parameters: Schema | None = Field(None, description="JSON Schema of the arguments, an object.")
    strict: bool | None = Field(None, description="Reject parameters that cannot be fully enforced.")


class Tool(RequestModel):
    type: Literal["function"] = Field(description="All tools are functions.")
    function: FunctionDefinition = Field(description="The function.")


class NamedFunction(RequestModel):
    name: FunctionName


class NamedTool(RequestModel):
    type: Literal["function"] = Field(description="All tools are functions.")
    function: NamedFunction = Field(description="The function to call.")


class JsonSchema(RequestModel):
    """Schema of the answer. ``strict`` rejects a schema that cannot be fully enforced."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    name: FunctionName
    description: str | None = Field(None, description="Accepted and ignored.")
    schema_: Schema | bool | None = Field(None, alias="schema", description="JSON Schema of the answer.")
    strict: bool | None = Field(None, description="Reject a schema that cannot be fully enforced.")


class ResponseFormat(RequestModel):
    """Structure of the answer. ``json_schema`` is required for type "json_schema" and invalid otherwise."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Kind of structure.")
    json_schema: JsonSchema | None = Field(None, description="The schema.")


class StructuredOutputs(RequestModel):
    """Structure of the answer in vLLM's form: exactly one of the fields."""

    json_: Schema | str | None = Field(None, alias="json", description="A JSON Schema, or its text.")
    regex: str | None = Field(None, min_length=1, max_length=MAX_REGEX, description="A regular expression.")
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="The possible answers."
    )
    json_object: bool | None = Field(None, description="Any JSON object.")


ToolChoice = Literal["none", "auto", "required"] | NamedTool
_ANY_OBJECT = '{"type": "object"}'


def schema_text(schema: Any, param: str) -> str:
    """Return a schema as text; ``True`` and None allow any JSON. Raises InvalidRequest."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidRequest(f"{param}: not valid JSON: {error}", param=param) from error
    if schema is None or schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: the schema must be a JSON object", param=param)
    return json_text(schema, param)


def json_text(value: Any, param: str) -> str:
    """Encode a JSON value. Raises InvalidRequest for values without an encoding, such as a lone surrogate."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeError, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{param}: cannot be written as JSON: {error}", param=param) from error


def _content_grammar(form: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar:
    """Return the grammar for the answer's content; its kind is "" if the content is free."""
    if form is not None:
        param = "response_format.json_schema"
        if (form.type == "json_schema") != (form.json_schema is not None):
            raise InvalidRequest(f"{param}: required with type 'json_schema', and only then", param=param)
        if form.type != "text" and structured is not None:
            raise InvalidRequest(
                "send either response_format or structured_outputs, not both", param="structured_outputs"
            )
        if form.json_schema is not None:
            text = schema_text(form.json_schema.schema_, f"{param}.schema")
            strict = form.json_schema.strict is True
            return Grammar(kind="json", text=text, param=f"{param}.schema", strict=strict)
        if form.type == "json_object":
            return Grammar(kind="json", text=_ANY_OBJECT, param="response_format")
    if structured is None:
        return Grammar(kind="", text="")
    param = "structured_outputs"
    given = [name for name in ("json_", "regex", "choice", "json_object") if getattr(structured, name)]
    if structured.json_ == {}:
        given.insert(0, "json_")
    if len(given) != 1:
        raise InvalidRequest(f"{param}: needs exactly one of json, regex, choice and json_object", param=param)
    param = f"{param}.{given[0].removesuffix('_')}"
    if structured.regex is not None:
        return Grammar(kind="regex", text=structured.regex, param=param)
    if structured.choice is not None:
        return Grammar(kind="choice", text=json_text(structured.choice, param), param=param)
    text = _ANY_OBJECT if structured.json_object else schema_text(structured.json_, param)
    return Grammar(kind="json", text=text, param=param)


def make_grammar(
    tools: list[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool,
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
) -> Grammar | None:
    """Return the grammar that the answer must follow, or None.

    Raises InvalidRequest for contradictory fields.
    """
    if tools is None and choice is None and response_format is None and structured is None:
        return None
    content = _content_grammar(response_format, structured)
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools: every function needs a unique name", param="tools")
    if not names and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice: the request defines no tools", param="tool_choice")
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in names:
        raise InvalidRequest(
            f"tool_choice: unknown tool {named!r}; the tools are {', '.join(map(repr, names))}",
            param="tool_choice",
        )
    schemas = [
        ToolSchema(
            name=tool.function.name,
            parameters=schema_text(tool.function.parameters, f"tools[{i}].function.parameters"),
            strict=tool.function.strict is True,
        )
        for i, tool in enumerate(tools or ())
        if named in (None, tool.function.name)
    ]
    if not schemas or choice == "none":
        return content if content.kind else None
    return msgspec.structs.replace(
        content,
        param=content.param or "tools",
        tools=schemas,
        must_call=named is not None or choice == "required",
        parallel=parallel and named is None,
    )
