"""AISBench's files and vLLM's JSON, from records whose figures can be worked out by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from bench_runs import failed, good, measured

from epd_serve.bench.result_files import vllm_result, write_aisbench
from epd_serve.bench.run import Run

#: What ``vllm bench serve --save-result --save-detailed`` of vLLM 0.32 writes for a chat server, without
#: what hangs on options of its own (probes, speculative decoding, ramps).
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times"),
    *("queue_times", "generated_texts", "errors", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}
#: Of AISBench 3.1.
AISBENCH_ROWS = ["E2EL", "TTFT", "TPOT", "ITL", "InputTokens", "OutputTokens", "OutputTokenThroughput"]
AISBENCH_ROWS += ["PrefillTokenThroughput"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two answers, 100 and 300 ms to the first token, and one failure."""
    made = measured([good(0, 0.0), good(1, 1.0, ttft_s=0.3), failed(2, 1.5)])
    made.path = tmp_path
    return made


def test_files_have_aisbenchs_layout(run: Run, tmp_path: Path) -> None:
    write_aisbench(run)
    folder = tmp_path / "performances" / "demo-model"
    assert sorted(path.name for path in folder.iterdir()) == ["mine.csv", "mine.json", "mine_details.jsonl"]
    rows = list(csv.reader((folder / "mine.csv").read_text().splitlines()))
    assert ",".join(rows[0]) == "Performance Parameters,Stage,Average,Min,Max,Median,P75,P90,P99,N"
    total = {row[0]: row[2:] for row in rows[1:] if row[1] == "total"}
    assert list(total)[: len(AISBENCH_ROWS)] == AISBENCH_ROWS
    assert total["TTFT"][:3] == ["200.0 ms", "100.0 ms", "300.0 ms"]
    assert total["TTFT"][-1] == "2"
    assert total["FirstChunkTTFT"][:2] == ["180.0 ms", "80.0 ms"]
    assert total["ScheduledTTFT"][0] == "201.0 ms"
    assert total["TPOT"][:4] == ["10.0 ms"] * 4
    assert total["ITL"][-1] == "8", "gaps, not requests"
    assert total["E2EL"][:3] == ["240.0 ms", "140.0 ms", "340.0 ms"]
    assert total["InputTokens"][0] == "50.0"
    assert total["OutputTokenThroughput"][1] == f"{round(5 / 0.34, 4)} token/s"
    assert total["PrefillTokenThroughput"][2] == "500.0 token/s"


def test_details_contain_every_request(run: Run, tmp_path: Path) -> None:
    write_aisbench(run)
    path = tmp_path / "performances" / "demo-model" / "mine_details.jsonl"
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert (first["success"], first["input_tokens"], first["output_tokens"]) == (True, 50, 5)
    assert first["ttft"] == pytest.approx(0.1)
    assert len(first["time_points"]) == 6
    assert second["latency"] == pytest.approx(0.34)
    assert (third["success"], third["failure"], third["error_info"]) == (False, "connect", "refused")


def test_result_json_has_vllms_names(run: Run) -> None:
    result = vllm_result(run)
    assert result.keys() >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["num_prompts"]) == (2, 1, 3)
    assert (result["request_rate"], result["burstiness"]) == (2.0, 1.0)
    assert result["ttfts"] == pytest.approx([0.1, 0.3, 0.0])
    assert result["output_lens"] == [5, 5, 0]
    assert [len(gaps) for gaps in result["itls"]] == [4, 4, 0]
    assert (result["mean_ttft_ms"], result["median_tpot_ms"]) == pytest.approx((200.0, 10.0))
    assert result["std_ttft_ms"] == pytest.approx(100.0), "of the population, as numpy has it"
    assert result["generated_texts"] == ["abcde", "abcde", ""]
    assert result["errors"] == ["", "", "connect: refused"]
    assert result["max_output_tokens_per_s"] == 5
    json.dumps(result)
