"""A request's traces for operators: access log, trace context, metrics under names that people know."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from metrics import metric_sums
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRACE = "0af7651916cd43dd8448eb211c80319c"
ROOT = Path(__file__).parents[2]


def text_of(log):
    return log.read_text()


async def line_of(log, request_id):
    for _ in range(1200):
        lines = [json.loads(line) for line in text_of(log).splitlines()]
        found = [line for line in lines if line["request_id"] == request_id]
        if found:
            [line] = found
            return line
        await asyncio.sleep(0.05)
    raise AssertionError(f"no line of {request_id}")


async def test_a_streamed_request_with_an_image_leaves_a_line_with_its_stages(log, ask):
    headers = {"x-request-id": "seen", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    _, answered = await ask("maroon", stream=True, max_tokens=5, headers=headers)
    assert answered["x-request-id"] == "seen"
    assert re.fullmatch(rf"00-{TRACE}-(?!b7ad6b7169203331)[0-9a-f]{{16}}-01", answered["traceparent"])
    line = await line_of(log, "seen")
    assert line["trace_id"] == TRACE
    assert (line["key"], line["endpoint"], line["modality"], line["status"]) == ("alice", "chat", "image", 200)
    assert (line["images"], line["completion_tokens"], line["finish_reason"]) == (1, 5, "length")
    assert len(line["pixels"]) == 1 and line["pixels"][0] > 100
    assert line["media_bytes"] > 50 and line["prompt_tokens"] > 10 and line["error"] is None
    assert 0 < line["ttft_ms"] < line["duration_ms"] and line["tpot_ms"] > 0
    assert (line["prefill"], line["decode"], line["retries"]) == ("p1", "d2", 0)
    stages = {stage["stage"]: stage for stage in line["stages"]}
    assert set(stages) == {"encode", "prefill", "kv_transfer", "decode"}
    assert (stages["encode"]["instance"], stages["encode"]["feature"]) == ("e0", "encoded")
    assert all(stage["ms"] >= 0 for stage in line["stages"])
    assert "sk-observed" not in text_of(log)


async def test_what_is_refused_is_logged_without_the_key(log, observed):
    headers = {"authorization": "Bearer sk-wrong", "x-request-id": "ignored-before-the-key"}
    async with observed.session.post(f"{observed.url}/v1/completions", json={}, headers=headers) as response:
        assert response.status == 401
        request_id = response.headers["x-request-id"]
    line = await line_of(log, request_id)
    assert (line["status"], line["key"], line["stages"]) == (401, None, [])
    assert "sk-wrong" not in text_of(log)


async def test_every_metric_of_the_board_is_in_metrics(observed, ask):
    await ask("navy", stream=True, max_tokens=4)
    names = set()
    for url in (observed.url, *(instance.url for instance in observed.instances.values())):
        async with observed.session.get(f"{url}/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            names |= {sample.name for sample in family.samples} | {family.name}
            if family.type == "counter":
                names.add(f"{family.name}_total")
    board = (ROOT / "deploy" / "grafana" / "epd-serve.json").read_text()
    asked = set(re.findall(r"epd_serve_[a-z0-9_]+", board))
    assert len(asked) > 20
    assert asked - names == set()


async def test_metrics_follow_a_request(observed, ask):
    async def figures():
        async with observed.session.get(f"{observed.url}/metrics") as response:
            return metric_sums(await response.text())

    before = await figures()
    await ask(stream=True, max_tokens=6)
    after = await figures()
    assert after["epd_serve_generation_tokens_total"] - before["epd_serve_generation_tokens_total"] == 6
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert after[f"epd_serve_{name}_count"] - before[f"epd_serve_{name}_count"] == 1
    name = "epd_serve_request_time_per_output_token_seconds_count"
    assert after[name] - before[name] == 1
    assert after["epd_serve_prompt_tokens_total"] > before["epd_serve_prompt_tokens_total"]
