"""Read requests to simulate: workloads of ``epd-serve bench``, Mooncake traces and access logs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from random import Random
from typing import Annotated, Any

import msgspec
from PIL import Image

from epd_serve.bench.types import Media
from epd_serve.bench.workloads import load_workload
from epd_serve.bench.workloads.files import BLOCK_TOKENS, parse_line
from epd_serve.bench.workloads.notation import (
    Size,
    parse_count,
    parse_factor,
    parse_switch,
    read_lines,
    split_spec,
)
from epd_serve.bench.workloads.synthetic import PRESETS
from epd_serve.protocol.wire import MediaRef

#: For images of unknown size: ShareGPT-4o's mean (EPD-Serve, section 4.1).
IMAGE_PIXELS = 802 * 652
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SimRequest:
    """One request.

    Attributes:
        at_s: time of sending.
        images: (name, pixels) of each; equal names mean the same image.
        num_text_tokens: prompt tokens without images.
        prefix: names of the prompt's leading parts of ``prefix_tokens`` tokens each, for prefix reuse.
    """

    at_s: float
    num_text_tokens: int
    num_output_tokens: int
    images: tuple[tuple[str, int], ...] = ()
    prefix: tuple[int, ...] = ()
    prefix_tokens: int = 512

    def __post_init__(self) -> None:
        if self.num_text_tokens < 1 or self.num_output_tokens < 1 or self.at_s < 0:
            raise ValueError(f"{self}: a request needs a prompt, an answer and a time of at least 0")

    @property
    def media(self) -> list[MediaRef]:
        return [MediaRef(name, pixels, 1) for name, pixels in self.images]

    @property
    def num_pixels(self) -> int:
        return sum(item.num_pixels for item in self.media)


def at_rate(requests: Sequence[SimRequest], rate: float) -> list[SimRequest]:
    """Return the requests with times scaled to a mean ``rate`` per second."""
    if not requests:
        return []
    first, last = requests[0].at_s, requests[-1].at_s
    span = last - first
    factor = (len(requests) - 1) / rate / span if span > 0 else 0.0
    return [
        replace(one, at_s=(one.at_s - first) * factor if span > 0 else number / rate)
        for number, one in enumerate(requests)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A workload to plan for.

    Attributes:
        name: its specification.
        rate: requested rate per second; None: as high as possible.
    """

    name: str
    requests: Sequence[SimRequest]
    rate: float | None


def read_load(spec: str, *, rate: float | None = None, count: int, seed: int, tokens_of_image: int = 0) -> Load:
    """Read a workload in the notation of ``epd-serve bench``; ``trace:FILE`` may also be the gateway's access log.

    A file with times has its own rate by default. The access log counts whole prompts; ``tokens_of_image`` tokens
    belong to each image. Texts of files count four characters per token.

    Args:
        count: most requests to take.

    Raises ValueError with the file, the line and a remedy.
    """
    name, _, _ = split_spec(spec)
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"--rate {rate:g}: write requests per second, above 0")
    if name == "trace":
        requests, is_timed = _read_trace(spec, count, tokens_of_image), True
    else:
        requests, is_timed = _drawn(spec, count, seed)
    if rate is None and is_timed and requests[-1].at_s > 0:
        rate = (len(requests) - 1) / requests[-1].at_s
    return Load(name=spec, requests=requests if rate is None else at_rate(requests, rate), rate=rate)


def _read_trace(spec: str, count: int, tokens_of_image: int) -> list[SimRequest]:
    _, path, options = split_spec(spec)
    if path is None:
        raise ValueError("workload trace needs a file; write trace:FILE.jsonl")
    scale = options.take("length_scale", parse_factor, "1")
    most = options.take("requests", parse_count, "")
    options.take("ignore_eos", parse_switch, "true")  # answers have the trace's lengths anyway
    options.check(f"trace:{path}")
    lines = read_lines(path, lambda _, line: _request(line, tokens_of_image, scale))
    requests = sorted((one for one in lines if one is not None), key=lambda one: one.at_s)
    if not requests:
        raise ValueError(f"{path} contains no served request")
    begin_s = requests[0].at_s
    return [replace(one, at_s=one.at_s - begin_s) for one in requests[: min(count, most or count)]]


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Stage(msgspec.Struct):
    item: str | None = None


class _Logged(msgspec.Struct):
    """A line of the gateway's access log."""

    time: str
    prompt_tokens: _Count
    completion_tokens: _Count
    request_id: str = ""
    images: int = 0
    pixels: list[_Count] = []
    stages: list[_Stage] = []


def _request(line: Mapping[str, Any], tokens_of_image: int, scale: float) -> SimRequest | None:
    """Return the request of a line; None for an unserved one of an access log."""
    if "input_length" in line:
        one = parse_line(line)
        return SimRequest(
            at_s=one.timestamp / 1e3,
            num_text_tokens=max(round(scale * one.input_length), 1),
            num_output_tokens=max(round(scale * one.output_length), 1),
            prefix=one.hash_ids[: one.input_length // BLOCK_TOKENS],
            prefix_tokens=max(round(scale * BLOCK_TOKENS), 1),
        )
    if "prompt_tokens" in line and "modality" in line:
        if not line["prompt_tokens"] or not line.get("completion_tokens"):
            return None
        return _logged(msgspec.convert(line, _Logged), tokens_of_image)
    raise ValueError(
        "neither a Mooncake trace (timestamp, input_length, output_length) nor an access log (prompt_tokens, "
        "completion_tokens)"
    )


def _logged(line: _Logged, tokens_of_image: int) -> SimRequest:
    """Convert a log line; images are identified by their encodes' names, unnamed ones are all different."""
    named = [stage.item for stage in line.stages if stage.item]
    names = [*dict.fromkeys(named), *(f"{line.request_id}/{i}" for i in range(line.images))][: line.images]
    sizes = [*line.pixels, *[IMAGE_PIXELS] * line.images]
    return SimRequest(
        at_s=datetime.fromisoformat(line.time).timestamp(),
        images=tuple(zip(names, sizes, strict=False)),
        num_text_tokens=max(line.prompt_tokens - line.images * tokens_of_image, 1),
        num_output_tokens=line.completion_tokens,
    )


def _drawn(spec: str, count: int, seed: int) -> tuple[list[SimRequest], bool]:
    """Return the requests of a load tester's workload, and whether it has times; else one arrives per second."""
    pixels: dict[int, int] = {}  # by id of the picture objects, which ``items`` keeps alive

    def blank(size: Size, rng: Random) -> Media:
        picture = Media(mime="image/jpeg")
        pixels[id(picture)] = size[0] * size[1]
        return picture

    name, _, _ = split_spec(spec)
    items = list(islice(load_workload(spec, blank).items(seed), count))
    is_timed = all(item.arrival_s is not None for item in items)
    draw = Random(f"{spec} {seed}")
    names: dict[int, str] = {}
    requests: list[SimRequest] = []
    at_s = 0.0
    for item in items:
        if item.conversation is not None:
            raise ValueError(f"--workload {spec}: the planner simulates only single requests; leave out turns")
        parts = [part for message in item.messages for part in message.parts]
        texts = [part for part in parts if isinstance(part, str)]
        media = [part for part in parts if isinstance(part, Media)]
        if item.modality not in ("text", "image"):
            raise ValueError(f"request {item.index} has {item.modality}: the planner knows only text and images")
        for one in media:
            names.setdefault(id(one), one.url or str(len(names)))
            if id(one) not in pixels:
                pixels[id(one)] = _num_pixels(one)
        # generated words are one token each; texts of files are estimated
        num_text = sum(len(one.split()) if name in PRESETS else len(one) // _CHARACTERS_PER_TOKEN for one in texts)
        at_s = item.arrival_s if is_timed and item.arrival_s is not None else at_s + draw.expovariate(1.0)
        requests.append(
            SimRequest(
                at_s=at_s,
                images=tuple((names[id(one)], pixels[id(one)]) for one in media),
                num_text_tokens=max(num_text, 1),
                num_output_tokens=item.max_tokens,
            )
        )
    requests.sort(key=lambda one: one.at_s)
    return [replace(one, at_s=one.at_s - requests[0].at_s) for one in requests], is_timed


def _num_pixels(picture: Media) -> int:
    if picture.url:
        return IMAGE_PIXELS
    try:
        with Image.open(io.BytesIO(picture.data)) as image:
            return image.width * image.height
    except OSError as error:
        raise ValueError(f"cannot read a picture of the workload: {error}") from error
