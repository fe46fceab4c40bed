"""The OpenAPI document is true: its schemas are valid, and real answers are what it says."""

import json
import re

import jsonschema
import pytest
from chat import chat

pytestmark = pytest.mark.asyncio(loop_scope="session")

CASES = [
    ("/v1/chat/completions", {**chat("Hi"), "max_tokens": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/v1/messages", {**chat("Hi"), "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [40]}),
]


async def get(api, path):
    async with api.session.get(api.url + path) as response:
        return response.status, await response.text()


@pytest.fixture(scope="session")
def check(api):
    """Checks an answer against what the document says of it."""

    async def check_answer(path, method, status, answer):
        document = json.loads((await get(api, "/openapi.json"))[1])
        content = document["paths"][path][method]["responses"][str(status)]["content"]
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        jsonschema.validate(answer, schema, jsonschema.Draft202012Validator)

    return check_answer


async def test_the_document_is_valid_and_names_every_route(api):
    status, text = await get(api, "/openapi.json")
    document = json.loads(text)
    assert status == 200 and document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert {path for path, _ in CASES} <= set(document["paths"])
    assert "multipart/form-data" in document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    for name, schema in document["components"]["schemas"].items():
        assert [field for field, one in schema.get("properties", {}).items() if "description" not in one] == [], (
            name
        )
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert not re.search(r'"(ge|gt|le|lt)":', text), "limits have JSON Schema's names"


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_requests_and_answers_are_what_it_says(api, check, path, body):
    document = json.loads((await get(api, "/openapi.json"))[1])
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, {**schema, "components": document["components"]}, jsonschema.Draft202012Validator)
    status, answer = await api.post(path, body)
    assert status == 200, answer
    await check(path, "post", status, answer)
    status, answer = await api.post(path, {**body, "colour": 1})
    assert status == 400
    await check(path, "post", status, answer)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/demo", "/v1/models/x", "/health", "/health/live"])
async def test_pages_are_what_it_says(api, check, path):
    status, text = await get(api, path)
    known = "/v1/models/{name}" if path.startswith("/v1/models/") else path
    await check(known, "get", status, json.loads(text))
