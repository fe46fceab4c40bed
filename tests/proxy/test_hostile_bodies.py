"""Bodies that are expensive to read are refused at a bounded cost."""

from __future__ import annotations

import time

import pytest
from hostile_bodies import HOSTILE

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.openai.generation import ChatCompletionRequest, CompletionRequest
from epd_serve.protocol.openai.responses import ResponsesRequest
from epd_serve.protocol.openai.tokenizing import DetokenizeBody, TokenizeBody

PARSERS = {
    "/v1/chat/completions": ChatCompletionRequest.parse,
    "/v1/completions": CompletionRequest.parse,
    "/v1/responses": ResponsesRequest.parse,
    "/tokenize": TokenizeBody.parse,
    "/detokenize": DetokenizeBody.parse,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_cheaply(name):
    path, status, text = HOSTILE[name]
    body = bytearray(text().encode())
    began_s = time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        PARSERS[path](body)
    assert time.process_time() - began_s < 2
    assert refused.value.status == status
    assert len(refused.value.message) < 1000
