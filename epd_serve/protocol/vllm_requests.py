"""Requests to a deployment with ``engine: vllm``: the gateway's own fields, and some that only vLLM has."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from pydantic import Field

from epd_serve.protocol.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest
from epd_serve.protocol.wire import OutputOptions


class VllmFields(GenerationRequest):
    """vLLM checks what these mean; an answer of a given structure may go on behind its end."""

    ends_with_structure: ClassVar[bool] = False

    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=1 << 20)

    def _output(self, kind: Literal["chat", "completion"], id: str, created: int, model: str) -> OutputOptions:
        options = super()._output(kind, id, created, model)
        own = self.model_dump(include=self._own_fields, exclude_none=True)
        return msgspec.structs.replace(options, for_vllm=msgspec.json.encode(own).decode()) if own else options

    _own_fields: ClassVar[set[str]] = {"return_token_ids", "prompt_logprobs"}


class VllmChatRequest(VllmFields, ChatCompletionRequest):
    """Body of ``POST /v1/chat/completions``."""

    reasoning_effort: str | None = None

    _own_fields: ClassVar[set[str]] = {*VllmFields._own_fields, "reasoning_effort"}


class VllmCompletionRequest(VllmFields, CompletionRequest):
    """Body of ``POST /v1/completions``."""
