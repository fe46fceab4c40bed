"""Requests from what was recorded: Mooncake traces, the gateway's access log, and the simulator's own lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from epd_serve.bench.workloads.options import LineError, json_lines, whole_number
from epd_serve.bench.workloads.trace import BLOCK_TOKENS, parse_line
from epd_serve.sim.workloads import WORKLOADS, SimRequest

#: Of an image whose size is not known: ShareGPT-4o's mean (EPD-Serve, section 4.1).
IMAGE_PIXELS = 802 * 652


def read_requests(source: str, *, count: int, seed: int, tokens_of_image: int = 0) -> list[SimRequest]:
    """``NAME:RATE`` of a known workload, or a file, told by its first line.

    The simulator's own lines are ``{"at_s": 0.5, "images": [["cat", 500000]], "text_tokens": 12,
    "output_tokens": 64}``. The access log knows prompts as a whole: ``tokens_of_image`` of them are each image's.

    Args:
        count: most requests to take, the first ones.

    Raises ValueError that names the file, the line and what would be right.
    """
    name, _, rate = source.partition(":")
    if name in WORKLOADS:
        try:
            return WORKLOADS[name].requests(count, float(rate or 1), seed)
        except ValueError as error:
            raise ValueError(f"--trace {source}: {error}; write {name}:RATE, requests a second") from None
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{path}: no such file; give a trace, or one of {', '.join(WORKLOADS)} as NAME:RATE")
    requests: list[SimRequest] = []
    for number, line in json_lines(path):
        try:
            requests += _request(line, tokens_of_image)
        except (LineError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not requests:
        raise ValueError(f"{path}: holds no request that was served")
    requests = sorted(requests, key=lambda one: one.at_s)[:count]
    begin_s = requests[0].at_s
    return [replace(one, at_s=one.at_s - begin_s) for one in requests]


def _request(line: Mapping[str, Any], tokens_of_image: int) -> Iterator[SimRequest]:
    if "input_length" in line:
        yield _mooncake(line)
    elif "prompt_tokens" in line and "modality" in line:
        if line["prompt_tokens"] and line.get("completion_tokens"):  # else it was never computed
            yield _logged(line, tokens_of_image)
    elif "text_tokens" in line:
        yield _own(line)
    else:
        raise LineError(
            "neither a Mooncake trace (timestamp, input_length, output_length), nor an access log (prompt_tokens, "
            "completion_tokens), nor text_tokens, output_tokens, at_s and images"
        )


def _mooncake(line: Mapping[str, Any]) -> SimRequest:
    one = parse_line(line)
    return SimRequest(
        at_s=one.timestamp_ms / 1e3,
        num_text_tokens=one.input_length,
        num_output_tokens=one.output_length,
        prefix=one.hash_ids[: one.input_length // BLOCK_TOKENS],
        prefix_tokens=BLOCK_TOKENS,
    )


def _logged(line: Mapping[str, Any], tokens_of_image: int) -> SimRequest:
    """Images are told apart by the names of their encodes; of those without one, none is like another. Logs of
    before there were pixels in them have images of a mean size."""
    at_s = datetime.fromisoformat(str(line.get("time"))).timestamp()
    num_images = whole_number(line, "images", 0, at_least=0)
    num_tokens = whole_number(line, "prompt_tokens")
    named = [
        str(stage["item"]) for stage in line.get("stages", ()) if isinstance(stage, dict) and stage.get("item")
    ]
    names = [*dict.fromkeys(named), *(f"{line.get('request_id')}/{i}" for i in range(num_images))][:num_images]
    pixels = line.get("pixels", [])
    if not isinstance(pixels, list) or not all(type(one) is int and one > 0 for one in pixels):
        raise LineError("pixels: expected a list of whole numbers, one for each image")
    sizes = [*pixels, *[IMAGE_PIXELS] * num_images]
    return SimRequest(
        at_s=at_s,
        images=tuple(zip(names, sizes, strict=False)),
        num_text_tokens=max(num_tokens - num_images * tokens_of_image, 1),
        num_output_tokens=whole_number(line, "completion_tokens"),
    )


def _own(line: Mapping[str, Any]) -> SimRequest:
    at_s, images = line.get("at_s"), line.get("images", [])
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not 0 <= at_s < float("inf"):
        raise LineError(f"at_s: {at_s!r} is no time in seconds")
    if not isinstance(images, list) or not all(
        isinstance(one, list) and len(one) == 2 and type(one[1]) is int and one[1] > 0 for one in images
    ):
        raise LineError('images: expected a list of [name, pixels], as in [["cat", 500000]]')
    return SimRequest(
        at_s=float(at_s),
        images=tuple((str(name), pixels) for name, pixels in images),
        num_text_tokens=whole_number(line, "text_tokens"),
        num_output_tokens=whole_number(line, "output_tokens"),
    )
