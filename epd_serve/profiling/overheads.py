"""Seconds that a request takes besides its stages, measured on real deployments with one request at a time.

``device_profile.py`` has measured the stages. A monolithic deployment takes longer than they do: that is the
gateway, HTTP and the preparation of images. Separate stages take longer again: that is their talk to each other,
measured while D streams to another client, as it does wherever it matters. One instance is kept busy to measure
how much instances slow each other down; ``contention.py`` measures the same inside one process. The simulator
finds queues.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
from rich.console import Console

from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.session import Session
from epd_serve.bench.types import Record, RunSettings
from epd_serve.bench.workloads import load_workload
from epd_serve.config import change_config, parse_config
from epd_serve.cost.least_squares import fit
from epd_serve.cost.profile import Profile, Transport

#: Requests of each kind, one after the other, in each deployment.
NUM_REQUESTS = 12
NUM_OUTPUT = 24
#: Sides of square images as they are sent.
SIDES = (256, 1024)
TEXT, LONG_TEXT = 10, 256
#: A prefill's seconds below which they are not to be told from the rest of a request.
_LEAST_S = 1e-3
#: Requests under way at a time that tell what a sequence costs a step besides the model.
TOGETHER = (8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadOptions:
    """``model`` and ``dtype`` as deployment files have them. ``mooncake``: stages apart talk over that too."""

    model: str
    device: str
    dtype: str
    threads: int | None = None
    num_requests: int = NUM_REQUESTS
    mooncake: bool = False


def with_overheads(
    profile: Profile, options: OverheadOptions, progress: Callable[[str], None] = lambda text: None
) -> Profile:
    """``profile`` with what deployments on ``options.device`` take besides its stages.

    Raises ValueError where a deployment does not come up or does not answer.
    """
    has_images = bool(profile.encode)
    with _asked("EPD", options, progress) as ask:
        whole = _measure(ask, has_images, options.num_requests)
        together = [(1, whole["text"])]
        together += [
            (count, ask(text_load(TEXT, 4 * NUM_OUTPUT), 2 * count, f"closed:{count}")) for count in TOGETHER
        ]
    line = "E-P-D" if has_images else "P-D"
    with _asked(line, options, progress) as ask:
        apart, beside_d = _measure_apart(ask, has_images, options.num_requests)
        beside: dict[str, tuple[list[Record], float]] = {}
        for stage, load in _LOADS.items():
            if has_images or stage != "E":
                with ask.busy(load), ask.occupied(stage) as share:
                    records = ask(text_load(TEXT, 2 * NUM_OUTPUT), options.num_requests)
                beside[stage] = records, share()
    request_s = max(_beyond(whole["text"], profile, 0), 0.0)
    known = msgspec.structs.replace(profile, request_s=request_s)
    image_s, image_pixel_s = _images(whole, known)
    tpot_s = _tpot_s(apart["text"])
    pairs = {f"D/{stage}": (_tpot_s(records) / tpot_s - 1) / share for stage, (records, share) in beside.items()}
    prefill_s = _longer(apart, "long")
    pairs["P/D"] = _longer(beside_d, "long") / prefill_s - 1 if prefill_s > _LEAST_S else 0.0
    if has_images:
        large = f"{SIDES[1]}"
        pairs["E/D"] = _encode_s(beside_d[large]) / _encode_s(apart[large]) - 1
    loop_s, stream_s = beside_steps(together, profile)
    known = msgspec.structs.replace(
        known,
        image_s=image_s,
        image_pixel_s=image_pixel_s,
        loop_s=loop_s,
        stream_s=stream_s,
        interference={pair: max(value, 0.0) for pair, value in pairs.items()},
    )
    here = Transport(handshake_s=profile.handshake_s, bytes_per_s=profile.link_bytes_per_s)
    known = known.with_transport(_talk(here, known, whole, apart, beside_d))
    if not options.mooncake:
        return known
    with _asked(line, options, progress, _MOONCAKE) as ask:
        apart, beside_d = _measure_apart(ask, has_images, options.num_requests)
    found = _talk(profile.transports["mooncake"], known, whole, apart, beside_d)
    return msgspec.structs.replace(known, transports={"mooncake": found})


_Measured = dict[str, list[Record]]


def _measure(ask: Asker, has_images: bool, count: int) -> _Measured:
    asked = {"text": text_load(TEXT), "long": text_load(LONG_TEXT)}
    if has_images:
        asked |= {f"{side}": image_load(side) for side in SIDES}
    return {name: ask(workload, count) for name, workload in asked.items()}


def _measure_apart(ask: Asker, has_images: bool, count: int) -> tuple[_Measured, _Measured]:
    """Stages apart, alone and while D streams to another client."""
    apart = _measure(ask, has_images, count)
    with ask.busy(_STREAMS):
        return apart, _measure(ask, has_images, count)


def _talk(link: Transport, known: Profile, whole: _Measured, apart: _Measured, beside_d: _Measured) -> Transport:
    """``link`` with the additional times of instances that communicate over it."""
    split_token_s = max(_longer(apart, "long") - _longer(whole, "long"), 0.0) / (LONG_TEXT - TEXT)
    known = msgspec.structs.replace(known, split_token_s=split_token_s)
    gaps = [_first_gap_s(one, known) for records in beside_d.values() for one in records]
    features = [_beyond(apart[f"{side}"], known, side, is_split=True) for side in SIDES if known.encode]
    return msgspec.structs.replace(
        link,
        split_s=max(_beyond(beside_d["text"], known, 0), 0.0),
        split_token_s=split_token_s,
        hand_over_s=max(median(gaps), 0.0),
        feature_s=max(median(features), 0.0) if features else 0.0,
    )


def text_load(num_tokens: int, num_output: int = NUM_OUTPUT, images: int = 0) -> str:
    return f"synthetic,text_tokens={num_tokens},output_tokens={num_output},image_share={images}"


def image_load(side: int, num_output: int = NUM_OUTPUT) -> str:
    return f"{text_load(TEXT, num_output, images=1)},image_size={side}x{side}"


_MOONCAKE = {
    "feature_store": "mooncake",
    "mooncake": {"protocol": "tcp"},
    "instances": {"kv_transfer": {"transport": "mooncake"}},
}
#: What keeps a stage of E-P-D busy, one request after the other, and how many of them.
_LOADS = {
    "P": (text_load(900, 1), 400),
    "E": (image_load(SIDES[1], 1), 80),
}
_STREAMS = text_load(TEXT, 512), 100
_STAGE_SECONDS = {"E": "encode", "P": "prefill"}
#: Where a stage is said to have had less to do, it was not what the other one was measured beside.
_LEAST_SHARE = 0.2
_TIMEOUT_S = 60.0
_SPENT = re.compile(r'^epd_serve_stage_seconds_sum\{stage="(\w+)"\} (\S+)', re.MULTILINE)
_RUNNING = re.compile(r"^epd_serve_in_flight_calls\{[^}]*\} (\d+)", re.MULTILINE)


def read_page(url: str, path: str) -> str:
    """A page of a server, without a proxy between. Raises OSError or ValueError."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with build_opener(ProxyHandler({})).open(Request(url + path, headers=headers), timeout=_TIMEOUT_S) as page:
        text: bytes = page.read()
    return text.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """A client of a deployment that is up, whose ``topology`` is told of to people."""

    topology: str
    url: str
    folder: Path
    progress: Callable[[str], None]
    model: str = "profile"
    #: Each measurement has its own, so that no picture and no prompt is in a cache from an earlier one.
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, workload: str, count: int, arrivals: str = "closed:1") -> list[Record]:
        """``count`` requests of a workload. Raises ValueError unless all are answered."""
        self.progress(f"{self.topology}: {workload}, {arrivals}")
        session = Session(console=Console(file=StringIO()), api_key=os.environ.get("OPENAI_API_KEY") or None)
        settings = RunSettings(
            base_url=self.url,
            model=self.model,
            workload=workload,
            num_requests=count,
            seed=next(self.seeds),
            arrivals=arrivals,
            num_warmups=2,
        )
        path = Path(tempfile.mkdtemp(dir=self.folder))
        run = session.run(path, settings, load_workload(workload))
        records = [one for one in run.records if one.succeeded and len(one.token_times_s) > 2]
        if len(records) < count:
            failed = [one.detail for one in run.records if not one.succeeded]
            raise ValueError(f"{self.topology}: {failed[0] if failed else 'answers of one token'}")
        return records

    @contextmanager
    def busy(self, load: tuple[str, int]) -> Iterator[None]:
        """Let another client send requests too, one after the other, inside the block."""
        workload, count = load
        command = [sys.executable, "-m", "epd_serve.cli", "bench", "--base-url", self.url, "--model", self.model]
        command += ["--workload", workload, "--arrivals", "closed:1", "--num-requests", str(count), "--no-report"]
        command += ["--work-dir", tempfile.mkdtemp(dir=self.folder), "--warmups", "0"]
        command += ["--seed", str(next(self.seeds))]
        nothing, before = subprocess.DEVNULL, self._num_running()
        client = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
        try:
            self._wait_busy(before)
            yield
        finally:
            client.kill()
            client.wait()

    @contextmanager
    def occupied(self, stage: str) -> Iterator[Callable[[], float]]:
        """Yield a function that returns, after the block, the part of its time in which E or P had work."""
        name = _STAGE_SECONDS[stage]
        began_s, before_s = time.monotonic(), self._seconds(name)
        share = _LEAST_SHARE
        yield lambda: share
        share = min(max((self._seconds(name) - before_s) / (time.monotonic() - began_s), _LEAST_SHARE), 1.0)

    def _seconds(self, stage: str) -> float:
        """Seconds that the finished requests have spent in a stage."""
        return sum(float(value) for name, value in _SPENT.findall(self._metrics()) if name == stage)

    def _num_running(self) -> int:
        """Calls that the gateway has under way."""
        return sum(map(int, _RUNNING.findall(self._metrics())))

    def _metrics(self) -> str:
        return read_page(self.url, "/metrics")

    def _wait_busy(self, before: int) -> None:
        """Wait until the gateway has more than ``before`` requests under way.

        The other client takes a while to make its pictures.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while (now := self._num_running()) <= before:
            before = min(before, now)
            if time.monotonic() > deadline:
                raise ValueError(f"{self.topology}: the client that keeps a stage busy sent nothing")
            time.sleep(0.05)


@contextmanager
def _asked(
    topology: str, options: OverheadOptions, progress: Callable[[str], None], changes: dict[str, Any] | None = None
) -> Iterator[Asker]:
    deployment = {
        "topology": topology if topology == "EPD" else f"({topology})",
        "model": options.model,
        "served_model_name": "profile",
        "devices": [options.device],
        "dtype": options.dtype,
        "instances": {} if options.threads is None else {"threads": options.threads},
    }
    config = parse_config(json.dumps(deployment), source="the profile's deployment")  # JSON is YAML
    config = change_config(config, changes or {})
    with tempfile.TemporaryDirectory(prefix="epd-serve-profile-") as folder:
        progress(f"{topology}: starting")
        candidate = Candidate(file=Path(folder) / "deployment.yaml", label=topology, config=config)
        with deployed(candidate, Path(folder) / "up.log") as url:
            yield Asker(topology=topology, url=url, folder=Path(folder), progress=progress)


def _beyond(records: Sequence[Record], profile: Profile, side: int, *, is_split: bool = False) -> float:
    """Seconds until the first token beyond what the profile knows; the median."""

    def known_s(one: Record) -> float:
        num_tokens = one.num_prompt_tokens or 1
        seconds = profile.request_s + profile.step_s(num_tokens, 1, 0, num_tokens**2)
        if side:
            seconds += profile.prepare_s(side * side) + profile.encode_s([side * side])
        # the reservation is there before the feature is
        return seconds + (profile.split_token_s * num_tokens if is_split else 0.0)

    return median((one.ttft_s or 0.0) - known_s(one) for one in records)


def _images(whole: dict[str, list[Record]], profile: Profile) -> tuple[float, float]:
    """Seconds to prepare an image: for each one, and for each pixel of it as it was sent."""
    if not profile.encode:
        return 0.0, 0.0
    small, large = (_beyond(whole[f"{side}"], profile, side) for side in SIDES)
    pixels = [side * side for side in SIDES]
    pixel_s = max((large - small) / (pixels[1] - pixels[0]), 0.0)
    return max(small - pixel_s * pixels[0], 0.0), pixel_s


def _longer(measured: dict[str, list[Record]], name: str) -> float:
    """Seconds to the first token beyond those of a short text; the median."""
    text_s = median(one.ttft_s or 0.0 for one in measured["text"])
    return max(median(one.ttft_s or 0.0 for one in measured[name]) - text_s, 1e-6)


def _tpot_s(records: Sequence[Record]) -> float:
    """The median over requests of their mean time per token, behind the second token.

    The first gap is the hand-over's; the mean is taken because the work beside a request comes and goes.
    """
    return median(fmean(one.itl_s[1:]) for one in records)


def _first_gap_s(record: Record, profile: Profile) -> float:
    """Seconds of the first gap beyond one step of two sequences and half of the step that was under way."""
    context = record.num_prompt_tokens or 1
    return record.itl_s[0] - 1.5 * profile.step_s(2, 2, 2 * context) - profile.handshake_s


def _encode_s(records: Sequence[Record]) -> float:
    """The median time from an encode's call to its answer, as the gateway saw it."""
    spans = [span.duration_s for one in records for span in one.stages if span.stage == "encode"]
    if not spans:
        raise ValueError("the deployment told nothing of its encodes")
    return median(spans)


def beside_steps(measured: Sequence[tuple[int, Sequence[Record]]], profile: Profile) -> tuple[float, float]:
    """Seconds of a decode step besides the model: those of the step, and those of each of its sequences.

    Args:
        measured: (number of requests at a time, their records).
    """
    beyond: list[float] = []
    for count, records in measured:
        context = median((one.num_prompt_tokens or 0) + one.num_output_tokens / 2 for one in records)
        # most gaps hold no prefill, which is a step of its own; means do
        gap_s = median(seconds for one in records for seconds in one.itl_s[1:])
        beyond.append(gap_s - profile.step_s(count, count, count * context))
    loop_s, stream_s = fit([[1.0, count] for count, _ in measured], beyond)
    return loop_s, stream_s
