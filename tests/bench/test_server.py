"""A server under test that tells more than its answers, and one that tells nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from load_tester import Scripts, session, settings

from epd_serve.bench import server
from epd_serve.bench.connection import Connections, Target
from epd_serve.bench.server import Server, parse_metrics, parse_npus, parse_nvidia

PAGE = rb"""# HELP vllm:num_requests_running of the engine
vllm:num_requests_running{model_name="a b}c\"d"} 3.0
vllm:prompt_tokens_total 12 1395066363000
epd_serve_requests_total{status="200"} 5 # {trace_id="x"} 0.5
epd_serve_ttft_seconds_bucket{le="1"} 4
epd_serve_requests_created 1.7e9
epd_serve_share NaN
epd_serve_half{status="2
epd_serve_word word
python_gc_objects 7
process_cpu_seconds_total 1.5
"""


def test_figures_of_a_page_of_metrics_without_times_exemplars_and_what_is_none() -> None:
    assert parse_metrics(PAGE) == {
        'vllm:num_requests_running{model_name="a b}c\\"d"}': 3.0,
        "vllm:prompt_tokens_total": 12.0,
        'epd_serve_requests_total{status="200"}': 5.0,
        "process_cpu_seconds_total": 1.5,
    }


def test_gpus_as_nvidias_tool_lists_them() -> None:
    text = "0, 37, 1024, 81559\n1, [N/A], 5, [Not Supported]\n"
    assert parse_nvidia(text) == {
        "cuda:0": {"utilisation": 0.37, "memory_used_bytes": 1024 * 2**20, "memory_bytes": 81559 * 2**20},
        "cuda:1": {"memory_used_bytes": 5 * 2**20},
    }
    assert (
        parse_nvidia("NVIDIA-SMI has failed because it couldn't talk to the driver, which is not there.\n") == {}
    )
    assert parse_nvidia("") == {}


def test_npus_as_npu_smi_lists_them() -> None:
    row = "| 0     910B3               | OK            | 97.5        41                0    / 0             |\n"
    text = (
        row
        + "| 0                         | 0000:C1:00.0  | 7           0    / 0          3379 / 65536         |\n"
    )
    figures = {"utilisation": 0.07, "memory_used_bytes": 3379 * 2**20, "memory_bytes": 65536 * 2**20}
    assert parse_npus(text) == {"npu:0": figures}
    assert parse_npus("") == {}


def test_a_server_that_takes_connections_and_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MEET_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server, "LOOK_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"timeout.*not finished within 0\.3 s"):
            session().begin(tmp_path / "run", settings(url), Scripts(("steady",)))

        async def look() -> dict[str, float]:
            connections = Connections(Target(url), timeout_s=600)
            try:
                return await Server(connections).metrics()
            finally:
                await connections.close()

        assert asyncio.run(look()) == {}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("key", "words"), [(None, "is not set"), ("sk-wrong", "is no key of it")])
def test_a_key_that_is_missing_or_wrong_is_named(key: str | None, words: str) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no key"}}, status=401)

    async def meet() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", refuse)
        async with TestServer(app) as served:
            connections = Connections(Target(str(served.make_url("/")).rstrip("/")), timeout_s=60)
            try:
                await Server(connections, api_key=key).meet(None)
            finally:
                await connections.close()

    with pytest.raises(ValueError, match=rf"HTTP 401.*OPENAI_API_KEY {words}"):
        asyncio.run(meet())


def test_what_would_not_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="put a key into OPENAI_API_KEY"):
        Target("http://somebody:secret@127.0.0.1:8000")
