"""The endpoints that take a body, and where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from epd_serve.backends.base import StageCalls
from epd_serve.protocol.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest
from epd_serve.protocol.responses import InputTokensCall, ResponsesRequest
from epd_serve.protocol.tokenizing import DetokenizeBody, TokenizeBody
from epd_serve.protocol.vllm_requests import VllmChatRequest, VllmCompletionRequest
from proxy.dispatch import Dispatcher
from proxy.endpoint import Endpoint, GenerationEndpoint
from proxy.responses import ResponsesEndpoint
from proxy.tokenizing import TokenizingEndpoint


def endpoints(
    dispatcher: Dispatcher, calls: Mapping[str, StageCalls], shared: Mapping[str, Any], *, for_vllm: bool
) -> Iterator[tuple[str, Endpoint]]:
    """(path, endpoint) of each; ``shared`` is what all of them are made with. ``for_vllm``: requests may have
    fields that only vLLM has."""
    types: tuple[tuple[str, str, type[GenerationRequest]], ...] = (
        ("chat", "/v1/chat/completions", VllmChatRequest if for_vllm else ChatCompletionRequest),
        ("completion", "/v1/completions", VllmCompletionRequest if for_vllm else CompletionRequest),
    )
    for kind, path, request_type in types:
        yield path, GenerationEndpoint(kind=kind, parse=request_type.parse, dispatcher=dispatcher, **shared)
    yield (
        "/v1/responses",
        ResponsesEndpoint(kind="responses", parse=ResponsesRequest.parse, dispatcher=dispatcher, **shared),
    )
    yield (
        "/v1/responses/input_tokens",
        TokenizingEndpoint(kind="input_tokens", parse=InputTokensCall.parse, calls=calls, **shared),
    )
    yield "/tokenize", TokenizingEndpoint(kind="tokenize", parse=TokenizeBody.parse, calls=calls, **shared)
    yield "/detokenize", TokenizingEndpoint(kind="detokenize", parse=DetokenizeBody.parse, calls=calls, **shared)
