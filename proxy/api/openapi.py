"""The OpenAPI document, made from the models that check requests, and a page that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from html import escape
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from epd_serve import __version__
from epd_serve.protocol.openai import answers
from epd_serve.protocol.openai.fields import LABELS, NEUTRAL, RESPONSES_NEUTRAL
from epd_serve.protocol.openai.generation import ChatCompletionRequest, CompletionRequest
from epd_serve.protocol.openai.messages import MESSAGE_NEUTRAL
from epd_serve.protocol.openai.responses import ResponsesRequest
from epd_serve.protocol.openai.tokenizing import DetokenizeBody, TokenizeBody
from epd_serve.protocol.openai.transcriptions import TranscriptionRequest

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body or an image is too large.",
    429: "Too much is asked for now; `Retry-After` says when to come again.",
    500: "Something failed.",
    502: "An instance failed while it had the request.",
    503: "No instance can take the request now.",
    504: "The request took too long.",
}

#: path → (request, answer, event of a stream, what it does)
_POSTS: dict[str, tuple[type[BaseModel], type[BaseModel], type[BaseModel] | None, str]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        answers.ChatCompletion,
        answers.ChatCompletionChunk,
        "Answer a chat with text and images",
    ),
    "/v1/completions": (CompletionRequest, answers.Completion, answers.Completion, "Go on with prompts"),
    "/v1/responses": (ResponsesRequest, answers.ResponseAnswer, None, "Answer in OpenAI's newer shape"),
    "/v1/responses/input_tokens": (ResponsesRequest, answers.InputTokens, None, "How long a response's input is"),
    "/v1/audio/transcriptions": (TranscriptionRequest, answers.Transcript, None, "Write down what is said"),
    "/tokenize": (TokenizeBody, answers.TokenizeResult, None, "Tokens of a prompt or a chat, images included"),
    "/detokenize": (DetokenizeBody, answers.DetokenizeResult, None, "Text of tokens"),
}
#: path → (answers by status, what it does)
_GETS: dict[str, tuple[dict[int, type[BaseModel]], str]] = {
    "/v1/models": ({200: answers.ModelList}, "Models served"),
    "/v1/models/{name}": ({200: answers.ModelCard, 404: answers.ErrorAnswer}, "One model"),
    "/health": ({200: answers.ReadyAnswer, 503: answers.ReadyAnswer}, "Whether requests can be served"),
    "/health/ready": ({200: answers.ReadyAnswer, 503: answers.ReadyAnswer}, "Whether to send requests here"),
    "/health/live": ({200: answers.LiveAnswer}, "Whether the gateway runs"),
}
_STREAMED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/audio/transcriptions"}
_FORMS = {"/v1/audio/transcriptions"}


@cache
def openapi_document() -> dict[str, Any]:
    """The document as JSON-like objects."""
    models: list[type[BaseModel]] = [answers.ErrorAnswer]
    for request, answer, event, _ in _POSTS.values():
        models += [request, answer, *([event] if event else [])]
    for by_status, _ in _GETS.values():
        models += by_status.values()
    _, schema = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=_REF)
    schemas = schema["$defs"]
    for name in ("ChatCompletionRequest", "CompletionRequest", "TokenizeBody", "DetokenizeBody"):
        _add_neutral(schemas[name], NEUTRAL)
    _add_neutral(schemas["ResponsesRequest"], RESPONSES_NEUTRAL, labels=frozenset())
    _add_neutral(schemas["Message"], MESSAGE_NEUTRAL, labels=frozenset())
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "epd-serve gateway",
            "version": __version__,
            "description": "The OpenAI API before separate Encode, Prefill and Decode instances.",
        },
        "paths": {
            **{path: {"post": _post(path)} for path in _POSTS},
            **{path: {"get": _get(path)} for path in _GETS},
            "/metrics": {"get": _plain_get("Prometheus metrics", "text/plain")},
            "/openapi.json": {"get": _plain_get("This document", "application/json")},
            "/docs": {"get": _plain_get("This document as a page", "text/html")},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def openapi_router() -> APIRouter:
    """``GET /openapi.json`` and ``/docs``."""
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi() -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(openapi_document))

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(await asyncio.to_thread(openapi_document)))

    return router


def docs_page(document: Mapping[str, Any]) -> str:
    """A plain page: no script, nothing loaded from elsewhere."""
    parts = [_STYLE, f"<h1>{escape(document['info']['title'])}</h1>"]
    parts.append('<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>')
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                reference = next(iter(operation["requestBody"]["content"].values()))["schema"]["$ref"]
                parts.append(_fields(schemas[reference.rpartition("/")[2]]))
    return "".join(parts)


_STYLE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>epd-serve gateway</title>'
    '<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light dark}'
    "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #8886;padding:.3rem .6rem;"
    "vertical-align:top;overflow-wrap:anywhere}</style>"
)


def _fields(schema: Mapping[str, Any]) -> str:
    rows = []
    for name, field in schema["properties"].items():
        required = " (required)" if name in schema.get("required", ()) else ""
        rows.append(
            f"<tr><td><code>{escape(name)}</code>{required}<td><code>{escape(_type(field))}</code>"
            f"<td>{escape(field.get('description', ''))}"
        )
    return f"<p>{escape(schema.get('description', ''))}</p><table>{''.join(rows)}</table>"


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " | ".join(_type(one) for one in field["anyOf"])
    if "enum" in field:
        return " | ".join(repr(value) for value in field["enum"])
    if field.get("type") == "array":
        return f"[{_type(field.get('items', {}))}]"
    return str(field.get("const", field.get("type", "any")))


def _add_neutral(
    schema: dict[str, Any],
    neutral: Mapping[str, tuple[tuple[Any, ...], str]],
    labels: frozenset[str] = LABELS,
) -> None:
    """Fields that may only ask for what happens anyway, and labels, which may hold anything."""
    for name, (accepted, advice) in neutral.items():
        if name not in schema["properties"]:
            schema["properties"][name] = {"enum": [None, *accepted], "description": advice}
    for name in sorted(labels - set(schema["properties"])):
        schema["properties"][name] = {"description": "A label of the caller's own; it changes no token."}


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=model.__name__)}}


def _errors() -> dict[str, Any]:
    content = {"application/json": _reference(answers.ErrorAnswer)}
    return {str(status): {"description": text, "content": content} for status, text in _ERRORS.items()}


def _post(path: str) -> dict[str, Any]:
    request, answer, _, summary = _POSTS[path]
    sent = "multipart/form-data" if path in _FORMS else "application/json"
    content: dict[str, Any] = {"application/json": _reference(answer)}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "security": [{}, {"key": []}],
        "parameters": [
            {
                "name": "x-request-id",
                "in": "header",
                "description": "Comes back with the answer and stands in logs.",
                "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"},
            }
        ],
        "requestBody": {"required": True, "content": {sent: _reference(request)}},
        "responses": {"200": {"description": "The answer", "content": content}, **_errors()},
    }


def _get(path: str) -> dict[str, Any]:
    by_status, summary = _GETS[path]
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": "get_" + path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            str(status): {"description": summary, "content": {"application/json": _reference(model)}}
            for status, model in by_status.items()
        },
    }
    if path.startswith("/v1/"):
        content = {"application/json": _reference(answers.ErrorAnswer)}
        for status in (401, 429, 503):
            operation["responses"][str(status)] = {"description": _ERRORS[status], "content": content}
        operation["security"] = [{}, {"key": []}]
    if "{name}" in path:
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return operation


def _plain_get(summary: str, media_type: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": {media_type: {"schema": {}}}}},
    }
