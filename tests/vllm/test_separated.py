"""E-P-D of vLLM instances: who does what, and what happens when one of them dies."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat import chat
from pictures import noise
from vllm_runs import MODEL, Deployment, Tokens, ask, ask_all, figures, same, up

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
EXTERNAL = "prompt_tokens_by_source_total external_kv_transfer"


@pytest.fixture(scope="module")
def deployment(python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with up(python, "E-P-D", model, tmp_path_factory.mktemp("up")) as running:
        yield running


def picture(seed: int, **fields: Any) -> dict[str, Any]:
    wish = {"model": MODEL, "max_tokens": 8, "ignore_eos": True, "logprobs": True, "skip_special_tokens": False}
    return chat("What is this?", noise(seed), **{**wish, **fields})


def features(deployment: Deployment, name: str, event: str) -> float:
    return figures(deployment.urls[name])[f"epd_serve_features_total {event}"]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_vllm_alone(
    stream: bool, deployment: Deployment, asked: list[dict[str, Any]], expected: list[Tokens]
) -> None:
    answers = ask_all(deployment.url, asked, stream=stream)
    wrong = [index for index, (a, b) in enumerate(zip(answers, expected, strict=True)) if not same(a, b)]
    assert not wrong, [(index, answers[index], expected[index]) for index in wrong]
    assert figures(deployment.urls["d0"])[EXTERNAL] > 0, "D has computed the prompts itself"
    for name in deployment.urls:
        deployment.check_idle(name)


def test_e_alone_encodes_and_never_twice(deployment: Deployment) -> None:
    at_e, fetched = features(deployment, "e0", "encoded"), features(deployment, "p0", "fetched")
    at_p = features(deployment, "p0", "encoded")
    first = ask(deployment.url, picture(100))
    assert features(deployment, "e0", "encoded") == at_e + 1
    assert features(deployment, "p0", "fetched") == fetched + 1
    reused = features(deployment, "e0", "reused")
    assert same(ask(deployment.url, picture(100, max_tokens=9))[:8], first)
    assert features(deployment, "e0", "encoded") == at_e + 1
    assert features(deployment, "e0", "reused") == reused + 1
    assert features(deployment, "p0", "encoded") == at_p == 1, "but for the picture to warm up with"


def test_the_api_is_passed_through(deployment: Deployment) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wishes: dict[str, Any] = {"ignore_eos": False, "max_tokens": 60, "logprobs": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with httpx.Client(base_url=deployment.url, timeout=120, trust_env=False) as client:
        answer = client.post("/v1/chat/completions", json=picture(7, **wishes, response_format=form)).json()
        text = answer["choices"][0]["message"]["content"]
        assert text.startswith("{"), answer
        several = client.post("/v1/chat/completions", json=picture(7, n=2)).json()
        assert [choice["index"] for choice in several["choices"]] == [0, 1]
        prompts = {"model": MODEL, "prompt": ["Hello", "Say apple"], "max_tokens": 4, "temperature": 0}
        completion = client.post("/v1/completions", json=prompts).json()
        assert [choice["index"] for choice in completion["choices"]] == [0, 1]
        assert completion["usage"]["completion_tokens"] == 8
        counted = client.post("/tokenize", json={"model": MODEL, "prompt": "Hello"}).json()
        assert counted["count"] == len(counted["tokens"]) > 0
        wrong = client.post("/v1/chat/completions", json=picture(7, max_tokens=100_000))
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error"), wrong.text


def test_a_client_that_leaves_takes_its_work_along(deployment: Deployment) -> None:
    body = {**picture(8), "max_tokens": 900, "stream": True}
    with (
        httpx.Client(base_url=deployment.url, timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        next(answer.iter_lines())
    for name in deployment.urls:
        deployment.check_idle(name)


def test_without_e_p_encodes_itself(
    deployment: Deployment, asked: list[dict[str, Any]], expected: list[Tokens]
) -> None:
    body = picture(9)
    with ThreadPoolExecutor(1) as thread:
        deployment.signal("e0", signal.SIGSTOP)  # it has the picture, and will never answer
        waiting = thread.submit(ask, deployment.url, body)
        time.sleep(0.5)
        deployment.kill("e0")
        first = waiting.result()
    assert same(ask(deployment.url, asked[0]), expected[0])
    deployment.wait_until(lambda: deployment.is_ready("e0"), "E is back")
    assert same(ask(deployment.url, body), first)


def test_a_dead_p_is_told_and_leaves_no_block_at_d(deployment: Deployment) -> None:
    with ThreadPoolExecutor(1) as thread:
        deployment.signal("p0", signal.SIGSTOP)
        waiting = thread.submit(ask, deployment.url, picture(10))
        time.sleep(1)
        killed_at = time.monotonic()
        deployment.kill("p0")
        with pytest.raises(AssertionError, match="instance_error"):
            waiting.result()
        assert time.monotonic() - killed_at < 2
    deployment.check_idle("d0")
    deployment.wait_until(lambda: deployment.is_ready("p0"), "P is back")
    ask(deployment.url, picture(10))


def test_a_dead_d_is_told_and_leaves_no_block_at_p(deployment: Deployment) -> None:
    body = {**picture(11), "max_tokens": 900, "stream": True}
    with (
        httpx.Client(base_url=deployment.url, timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        for _ in range(3):
            next(lines)
        killed_at = time.monotonic()
        deployment.kill("d0")
        with pytest.raises(httpx.RemoteProtocolError):
            told = [line for line in lines if line]
            raise AssertionError(f"the answer ended in order: {told[-1]}")
        assert time.monotonic() - killed_at < 2
    deployment.check_idle("p0")
    deployment.wait_until(lambda: deployment.is_ready("d0"), "D is back")
    ask(deployment.url, picture(11))
