"""Routes with a request body: FastAPI matches and documents them, an endpoint serves them."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import FastAPI, Header, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.types import ASGIApp

from epd_serve.protocol.anthropic import CountTokensRequest, MessagesRequest
from epd_serve.protocol.openai.generation import ChatCompletionRequest, CompletionRequest
from epd_serve.protocol.openai.responses import ResponsesRequest
from epd_serve.protocol.openai.tokenizing import DetokenizeBody, DetokenizeResult, TokenizeBody, TokenizeResult
from epd_serve.protocol.openai.transcriptions import TranscriptionRequest
from epd_serve.protocol.openai.translated import InputTokens

bearer = HTTPBearer(auto_error=False, description="An API key, if the gateway requires one.")
RequestId = Annotated[str | None, Header(alias="x-request-id", description="Returned, and named in logs.")]

_ERRORS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or unknown.",
    404: "The model is unknown.",
    413: "The body or a media item is too large.",
    429: "Too many requests; `Retry-After` says when to try again.",
    500: "An error inside the gateway.",
    502: "An instance failed.",
    503: "No instance can take the request now.",
    504: "The request took too long.",
}
_OPENAI = "https://platform.openai.com/docs/api-reference/"
_ANTHROPIC = "https://docs.anthropic.com/en/api/"
#: Path → (body, answer as a model or a page of the API's reference, summary).
_ROUTES: dict[str, tuple[type[BaseModel], type[BaseModel] | str, str]] = {
    "/v1/chat/completions": (ChatCompletionRequest, f"{_OPENAI}chat/object", "Answer a chat with text and media"),
    "/v1/completions": (CompletionRequest, f"{_OPENAI}completions/object", "Continue prompts"),
    "/v1/responses": (ResponsesRequest, f"{_OPENAI}responses/object", "Answer with a response object"),
    "/v1/responses/input_tokens": (ResponsesRequest, InputTokens, "Count the tokens of an input"),
    "/v1/audio/transcriptions": (TranscriptionRequest, f"{_OPENAI}audio/json-object", "Transcribe speech"),
    "/v1/messages": (MessagesRequest, f"{_ANTHROPIC}messages", "Answer messages (Anthropic)"),
    "/v1/messages/count_tokens": (CountTokensRequest, InputTokens, "Count the tokens of messages"),
    "/tokenize": (TokenizeBody, TokenizeResult, "Return the tokens of a prompt or chat"),
    "/detokenize": (DetokenizeBody, DetokenizeResult, "Return the text of tokens"),
}


class ErrorDetail(BaseModel):
    """An error."""

    message: str = Field(description="The problem and how to fix it.")
    type: str = Field(description="Class of the error.")
    param: str | None = Field(description="The invalid field, such as messages[0].content.")
    code: str | None = Field(description="Machine-readable name.")


class ErrorAnswer(BaseModel):
    """The answer to a request that failed."""

    error: ErrorDetail = Field(description="The error.")


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI documentation of error answers, by default of all statuses."""
    error: dict[str, Any] = {"model": ErrorAnswer}
    known: dict[int | str, dict[str, Any]] = {"default": {**error, "description": "An error."}}
    for status in statuses or _ERRORS:
        known[status] = {**error, "description": _ERRORS[status]}
    return known


def add_body_route(app: FastAPI, path: str, endpoint: ASGIApp) -> None:
    """Route POST requests of a path to ``endpoint``; FastAPI sees a stub that documents it."""
    body, answer, summary = _ROUTES[path]

    def documented(body: Any, x_request_id: RequestId = None) -> None: ...

    extra: dict[str, Any] = {}
    documented.__annotations__["body"] = body
    if body is TranscriptionRequest:
        del documented.__annotations__["body"]
        form = {"multipart/form-data": {"schema": body.model_json_schema()}}
        extra["requestBody"] = {"required": True, "content": form}
    whole: dict[str, Any] = {"description": "The answer"}
    if isinstance(answer, str):
        described = {"type": "object", "description": f"The object of {answer}"}
        events = {"type": "string", "description": "Server-sent events, with stream: true."}
        whole["content"] = {"application/json": {"schema": described}, "text/event-stream": {"schema": events}}
    else:
        whole["model"] = answer
    app.router.add_api_route(
        path,
        documented,
        methods=["POST"],
        response_model=None,
        responses={200: whole, **error_answers()},
        dependencies=[Security(bearer)],
        openapi_extra=extra,
        operation_id=path.strip("/").replace("/", "_"),
        summary=summary,
    )
    cast(APIRoute, app.router.routes[-1]).app = endpoint
