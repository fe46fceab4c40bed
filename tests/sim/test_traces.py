"""Mooncake traces, the gateway's access log and the simulator's own lines."""

import json
from pathlib import Path

import msgspec
import pytest

from epd_serve.sim.traces import IMAGE_PIXELS, read_requests
from proxy.observe.access_log import Line, StageLine


def written(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_mooncake_trace_keeps_its_prefixes(tmp_path: Path) -> None:
    source = written(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]},
    )
    first, second = read_requests(source, count=10, seed=0)
    assert (first.at_s, first.num_text_tokens, first.num_output_tokens, first.prefix) == (0.0, 600, 7, (1,))
    assert (second.at_s, second.prefix) == (2.0, (1, 2))  # the last block is not full: nobody can share it
    assert len(read_requests(source, count=1, seed=0)) == 1


def test_the_gateways_history(tmp_path: Path) -> None:
    line = Line(
        time="2026-01-02T03:04:05.500Z",
        request_id="r1",
        trace_id="",
        key=None,
        endpoint="chat",
        model="m",
        modality="image",
        images=2,
        pixels=(640 * 480, 28 * 28),
        media_bytes=1,
        stream=True,
        status=200,
        error=None,
        finish_reason="stop",
        prompt_tokens=1100,
        completion_tokens=9,
        ttft_ms=1.0,
        tpot_ms=1.0,
        duration_ms=1.0,
        queue_ms=0.0,
        prefill="p0",
        decode="d0",
        stages=[StageLine("encode", 0.0, 1.0, item="cat"), StageLine("encode", 0.0, 1.0, item="cat")],
        retries=0,
        continuations=0,
        encode_retries=0,
    )
    log = tmp_path / "access.jsonl"
    refused = msgspec.structs.replace(line, prompt_tokens=None, completion_tokens=None, status=400)
    log.write_bytes(b"\n".join(msgspec.json.encode(one) for one in (line, refused)))
    (request,) = read_requests(str(log), count=10, seed=0, tokens_of_image=500)
    assert (request.num_text_tokens, request.num_output_tokens) == (100, 9)
    assert request.images == (("cat", 640 * 480), ("r1/0", 28 * 28))
    before = {name: value for name, value in msgspec.to_builtins(line).items() if name != "pixels"}
    log.write_bytes(msgspec.json.encode(before))
    (request,) = read_requests(str(log), count=10, seed=0)
    assert {pixels for _, pixels in request.images} == {IMAGE_PIXELS}
    log.write_bytes(msgspec.json.encode({**before, "pixels": [0]}))
    with pytest.raises(ValueError, match="one for each image"):
        read_requests(str(log), count=10, seed=0)


def test_own_lines_and_names(tmp_path: Path) -> None:
    source = written(
        tmp_path / "own.jsonl", {"at_s": 1, "images": [["cat", 1000]], "text_tokens": 3, "output_tokens": 2}
    )
    (request,) = read_requests(source, count=10, seed=0)
    assert (request.at_s, request.images) == (0.0, (("cat", 1000),))
    assert len(read_requests("text:4", count=5, seed=0)) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"x": 1}, "neither a Mooncake trace"),
        ({"timestamp": "soon", "input_length": 1, "output_length": 1}, "no time in milliseconds"),
        ({"timestamp": 1, "input_length": 0, "output_length": 1}, "input_length: 0 is no whole number"),
        ({"at_s": 1, "images": ["cat"], "text_tokens": 3, "output_tokens": 2}, "list of .name, pixels."),
        ({"at_s": -1, "text_tokens": 3, "output_tokens": 2}, "no time in seconds"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"trace.jsonl:1: .*{message}"):
        read_requests(written(tmp_path / "trace.jsonl", line), count=10, seed=0)
    with pytest.raises(ValueError, match=r"no such file; give a trace, or one of sharegpt-4o"):
        read_requests(str(tmp_path / "nothing"), count=10, seed=0)
    with pytest.raises(ValueError, match="write text:RATE"):
        read_requests("text:0", count=10, seed=0)
