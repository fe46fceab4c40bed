"""The endpoints that take a body, and where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from epd_serve.backends.base import StageCalls
from epd_serve.protocol.openai import ChatCompletionRequest, CompletionRequest
from epd_serve.protocol.responses import InputTokensCall, ResponsesRequest
from epd_serve.protocol.tokenizing import DetokenizeBody, TokenizeBody
from proxy.endpoint import Endpoint, GenerationEndpoint
from proxy.generation import Generator
from proxy.responses import ResponsesEndpoint
from proxy.tokenizing import TokenizingEndpoint


def endpoints(
    generator: Generator, calls: Mapping[str, StageCalls], shared: Mapping[str, Any]
) -> Iterator[tuple[str, Endpoint]]:
    """(path, endpoint) of each; ``shared`` is what all of them are made with."""
    for kind, path, request_type in (
        ("chat", "/v1/chat/completions", ChatCompletionRequest),
        ("completion", "/v1/completions", CompletionRequest),
    ):
        yield path, GenerationEndpoint(kind=kind, parse=request_type.parse, generator=generator, **shared)
    yield (
        "/v1/responses",
        ResponsesEndpoint(kind="responses", parse=ResponsesRequest.parse, generator=generator, **shared),
    )
    yield (
        "/v1/responses/input_tokens",
        TokenizingEndpoint(kind="input_tokens", parse=InputTokensCall.parse, calls=calls, **shared),
    )
    yield "/tokenize", TokenizingEndpoint(kind="tokenize", parse=TokenizeBody.parse, calls=calls, **shared)
    yield "/detokenize", TokenizingEndpoint(kind="detokenize", parse=DetokenizeBody.parse, calls=calls, **shared)
