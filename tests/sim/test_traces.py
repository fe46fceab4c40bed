"""Mooncake traces, the gateway's access log and the load tester's workloads."""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from PIL import Image

from epd_serve.sim.workloads import IMAGE_PIXELS, Load, SimRequest, read_load


def written(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read_requests(file: str, *, count: int = 10, tokens_of_image: int = 0) -> list[SimRequest]:
    return list(read_load(f"trace:{file}", count=count, seed=0, tokens_of_image=tokens_of_image).requests)


def drawn(spec: str, count: int = 200) -> Load:
    return read_load(spec, rate=8.0, count=count, seed=0)


def test_a_mooncake_trace_keeps_its_prefixes(tmp_path: Path) -> None:
    source = written(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]},
    )
    first, second = read_requests(source)
    assert (first.at_s, first.num_text_tokens, first.num_output_tokens, first.prefix) == (0.0, 600, 7, (1,))
    assert (second.at_s, second.prefix) == (2.0, (1, 2))  # the last block is not full: nobody can share it
    assert len(read_requests(source, count=1)) == 1


def test_an_access_log_becomes_requests(tmp_path: Path) -> None:
    line = {
        "time": "2026-01-02T03:04:05.500Z",
        "request_id": "r1",
        "modality": "image",
        "images": 2,
        "pixels": (640 * 480, 28 * 28),
        "prompt_tokens": 1100,
        "completion_tokens": 9,
        "stages": [{"stage": "encode", "start_ms": 0.0, "ms": 1.0, "item": "cat"}] * 2,
    }
    log = tmp_path / "access.jsonl"
    refused = line | {"prompt_tokens": None, "completion_tokens": None}
    log.write_bytes(b"\n".join(msgspec.json.encode(one) for one in (line, refused)))
    (request,) = read_requests(str(log), tokens_of_image=500)
    assert (request.num_text_tokens, request.num_output_tokens) == (100, 9)
    assert request.images == (("cat", 640 * 480), ("r1/0", 28 * 28))
    log.write_bytes(msgspec.json.encode({**line, "pixels": []}))
    (request,) = read_requests(str(log))
    assert {pixels for _, pixels in request.images} == {IMAGE_PIXELS}
    log.write_bytes(msgspec.json.encode({**line, "pixels": [0]}))
    with pytest.raises(ValueError, match=r"pixels"):
        read_requests(str(log))


def test_the_load_testers_workloads_are_drawn_without_pictures() -> None:
    load = drawn("sharegpt4o-like", count=2000)
    assert (load.rate, len(load.requests)) == (8.0, 512), "the workload has so many"
    images = [one for request in load.requests for one in request.images]
    assert len(set(images)) == 512
    assert fmean(pixels for _, pixels in images) == pytest.approx(802 * 652, rel=0.05)
    assert fmean(one.num_text_tokens for one in load.requests) == pytest.approx(9.6, rel=0.1)
    assert load.requests[-1].at_s == pytest.approx(511 / 8)
    shown = drawn("synthetic,image_share=1,image_size=64x64,image_reuse=0.5,output_tokens=7").requests
    names = Counter(name for one in shown for name, _ in one.images)
    assert len(names) == pytest.approx(100, abs=25) and {one.num_output_tokens for one in shown} == {7}
    assert drawn("synthetic,image_share=0").requests[0].images == ()
    assert read_load("synthetic", count=20, seed=0).rate is None


def test_a_file_of_requests_is_read_for_its_sizes(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "cat.png")
    lines = [
        {"prompt": "x" * 40, "images": ["cat.png"], "max_tokens": 9},
        {"prompt": "y", "images": ["https://host/dog.png", "cat.png"]},
    ]
    first, second = drawn(f"custom:{written(tmp_path / 'own.jsonl', *lines)}").requests
    assert (first.num_text_tokens, first.num_output_tokens, second.num_text_tokens) == (10, 9, 1)
    (cat,) = first.images
    assert cat[1] == 1200 and second.images == (("https://host/dog.png", IMAGE_PIXELS), cat)


@pytest.mark.parametrize("line", [{"x": 1}, {"timestamp": "soon", "input_length": 1, "output_length": 1}])
def test_an_invalid_line_is_named(tmp_path: Path, line: object) -> None:
    with pytest.raises(ValueError, match=r"trace.jsonl:1: "):
        read_requests(written(tmp_path / "trace.jsonl", line))
