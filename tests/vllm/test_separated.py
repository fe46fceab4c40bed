"""E-P-2D of vLLM instances: who does what, and what happens when one of them dies.

One deployment serves all tests, in order. A start of vLLM takes long: the instances die one after the other, each
when the tests that need it are through, and come back together.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from chat import chat
from pictures import noise
from vllm_runs import MODEL, Deployment, Tokens, ask, check_all, figures, same, streamed_tokens, up

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
EXTERNAL = "prompt_tokens_by_source_total external_kv_transfer"
DECODES = ("d0", "d1")
ERROR_WITHIN_S = 2
#: For an answer, once a new P is there; a D that waits for the dead one takes two minutes.
WITH_NEW_P_S = 60
#: After which vLLM's connector frees blocks of P that no D has asked for, and of D that no P has written to.
LEASE_S = 150
#: The picture that E dies with, and what was answered about pictures then.
LOST = 9
ANSWERS: dict[int, Tokens] = {}


@pytest.fixture(scope="module")
def deployment(python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with up(python, "E-P-2D", model, tmp_path_factory.mktemp("up")) as running:
        yield running


def picture(seed: int, **fields: Any) -> dict[str, Any]:
    wish = {"model": MODEL, "max_tokens": 8, "ignore_eos": True, "logprobs": True, "skip_special_tokens": False}
    return chat("What is this?", noise(seed), **{**wish, **fields})


@pytest.fixture(scope="module")
def pids(deployment: Deployment) -> dict[str, int]:
    """The ids of the instances' first processes."""
    return {name: deployment.pid(name) for name in deployment.urls}


def features(deployment: Deployment, name: str, event: str) -> float:
    return figures(deployment.urls[name])[f"epd_serve_features_total {event}"]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_vllm_alone(
    stream: bool, deployment: Deployment, asked: list[dict[str, Any]], expected: list[Tokens]
) -> None:
    check_all(deployment.url, asked, expected, stream=stream)
    for name in DECODES:
        assert figures(deployment.urls[name])[EXTERNAL] > 0, f"{name} has computed the prompts itself"
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
    assert features(deployment, "p0", "encoded") == at_p <= 1, "the picture to warm up with"


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
        scored = client.post("/v1/completions", json={**prompts, "prompt": "Hello", "echo": True, "logprobs": 1})
        numbers = scored.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert numbers[0] is None and len(numbers) == counted["count"] + 4 and None not in numbers[1:]
        own = {"return_token_ids": True, "prompt_logprobs": 1}
        told = client.post("/v1/chat/completions", json=picture(7, **own)).json()
        assert len(told["choices"][0]["token_ids"]) == 8
        assert len(told["prompt_logprobs"]) == told["usage"]["prompt_tokens"]
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


def test_a_storm_of_clients_that_leave_holds_no_block(deployment: Deployment) -> None:
    """Many of them before D has heard of their requests: P keeps their blocks for a minute, and no longer."""

    def leave_early(number: int) -> None:
        body = {**picture(7 + number % 2), "max_tokens": 400, "stream": True}
        with (
            suppress(httpx.TimeoutException),
            httpx.Client(base_url=deployment.url, timeout=0.01 * number, trust_env=False) as client,
        ):
            client.post("/v1/chat/completions", json=body)

    with ThreadPoolExecutor(60) as threads:
        list(threads.map(leave_early, range(1, 61)))
    ended = time.monotonic()
    for name in deployment.urls:
        deployment.check_idle(name)
    assert time.monotonic() - ended < LEASE_S


def test_processes_that_wait_do_not_spin(deployment: Deployment) -> None:
    """vLLM's would, for a second after each answer."""
    ask(deployment.url, picture(8))
    roots = [psutil.Process(deployment.pid(name)) for name in deployment.urls]
    processes = [one for root in roots for one in (root, *root.children(recursive=True))]

    def spent() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in processes)

    before = spent()
    time.sleep(1)
    assert spent() - before < 0.7


def generated(deployment: Deployment, name: str) -> float:
    """Tokens."""
    return figures(deployment.urls[name])["generation_tokens_total"]


def working(deployment: Deployment, key: str) -> str | None:
    """A decode instance with a request in the state that a figure counts."""
    for name in DECODES:
        with suppress(httpx.TransportError):  # it may be on its way back
            if figures(deployment.urls[name])[key]:
                return name
    return None


def test_a_dead_d_is_told_and_leaves_no_block(deployment: Deployment, pids: dict[str, int]) -> None:
    """Answers go on at the other D, those to pictures too; one of several choices breaks off."""
    long = {"max_tokens": 900, "stream": True}
    words = {**picture(11), **chat("Count to 900."), "model": MODEL}
    told: list[str] = []
    with ExitStack() as open_ones:
        client = open_ones.enter_context(httpx.Client(base_url=deployment.url, timeout=60, trust_env=False))

        def begin(body: dict[str, Any]) -> Iterator[str]:
            """Its lines, the first token's at the front."""
            answer = client.stream("POST", "/v1/chat/completions", json={**body, **long})
            lines = open_ones.enter_context(answer).iter_lines()
            return chain([next(lines)], lines)

        dead, other = DECODES
        deployment.wait_until(partial(deployment.is_ready, dead), f"{dead} is ready")
        deployment.drain(other)
        lines = begin(picture(11, n=2))
        begun = [(body, begin(body)) for body in (picture(11), words)]
        deployment.wait_until(lambda: figures(deployment.urls[dead])["num_requests_running"] == 3, "it has them")
        deployment.drain(other, False)
        killed_at = time.monotonic()
        deployment.kill(dead)
        with pytest.raises(httpx.RemoteProtocolError):  # broken off, so that no client takes it for whole
            told += (line for line in lines if line)
        assert time.monotonic() - killed_at < ERROR_WITHIN_S
        answers = [(body, streamed_tokens(text)) for body, text in begun]
    assert deployment.gateway_figure("request_continuations_total") >= 2
    for body, answer in answers:
        assert same(answer, ask(deployment.url, {**body, **long}, stream=True))
    assert json.loads(told[-1].removeprefix("data: "))["error"]["type"] == "instance_error", told[-1]
    for name in {"p0", *DECODES} - {dead}:
        deployment.check_idle(name)
    ask(deployment.url, picture(11))


def test_without_e_p_encodes_itself(
    deployment: Deployment, pids: dict[str, int], asked: list[dict[str, Any]], expected: list[Tokens]
) -> None:
    def taken_over() -> float:
        total = 0.0
        for name in DECODES:
            with suppress(httpx.TransportError):  # one is on its way back
                total += figures(deployment.urls[name])[EXTERNAL]
        return total

    before, at_p = taken_over(), features(deployment, "p0", "encoded")
    with ThreadPoolExecutor(1) as thread:
        deployment.signal("e0", signal.SIGSTOP)
        waiting = thread.submit(ask, deployment.url, picture(LOST))
        deployment.wait_until(deployment.encodes_in_flight, "E has a picture, and will never answer")
        deployment.kill("e0")
        ANSWERS[LOST] = waiting.result()
    assert features(deployment, "p0", "encoded") == at_p + 1
    assert taken_over() > before, "D takes over KV of pictures that it got with their pixels, too"
    assert same(ask(deployment.url, asked[1]), expected[1])


def test_a_dead_p_is_waited_for_and_leaves_no_block_at_d(deployment: Deployment, pids: dict[str, int]) -> None:
    # of words: of a picture P itself would have to say first that it encodes it, as E may be gone
    words = {**picture(10), **chat("What is it?"), "model": MODEL}
    with ThreadPoolExecutor(1) as thread:
        deployment.signal("p0", signal.SIGSTOP)
        waiting = thread.submit(ask, deployment.url, words)
        deployment.wait_until(lambda: working(deployment, "num_requests_waiting"), "D waits for KV")
        deployment.kill("p0")
        answer = waiting.result()
        asked_at = time.monotonic()
        assert same(answer, ask(deployment.url, words))
        assert time.monotonic() - asked_at < WITH_NEW_P_S, "D takes the new P for the old one"
    alive = [name for name in DECODES if deployment.pid(name) == pids[name]]
    assert alive
    for name in alive:
        deployment.check_idle(name)


def test_the_dead_come_back(
    deployment: Deployment, pids: dict[str, int], asked: list[dict[str, Any]], expected: list[Tokens]
) -> None:
    for name in deployment.urls:
        deployment.wait_until(partial(deployment.is_ready, name), f"{name} is back")
    assert sum(deployment.pid(name) != pid for name, pid in pids.items()) == 3
    check_all(deployment.url, asked, expected)
    at_p = features(deployment, "p0", "encoded")
    assert same(ask(deployment.url, picture(LOST)), ANSWERS[LOST]), "E encodes as P did"
    assert features(deployment, "p0", "encoded") == at_p <= 1, "the picture to warm up with"


def test_an_answer_of_which_the_client_has_nothing_is_begun_again(deployment: Deployment) -> None:
    dead, other = DECODES
    for name in DECODES:
        deployment.wait_until(partial(deployment.is_ready, name), f"{name} is ready")
    with ThreadPoolExecutor(1) as thread:
        deployment.drain(other)
        for seed in range(12, 20):  # D may be through before it is stopped
            long = picture(seed, max_tokens=900)
            made = generated(deployment, dead)
            waiting = thread.submit(ask, deployment.url, long)
            deployment.wait_until(
                lambda made=made, waiting=waiting: waiting.done() or generated(deployment, dead) > made,
                "D decodes",
            )
            deployment.signal(dead, signal.SIGSTOP)
            if not wait([waiting], 1).done:
                break
            deployment.signal(dead, signal.SIGCONT)
        deployment.drain(other, False)
        made = generated(deployment, other)
        deployment.kill(dead)
        again = waiting.result()
    deployment.wait_until(lambda: generated(deployment, other) >= made + 900, "the other D has made it whole")
    assert same(ask(deployment.url, long), again)
