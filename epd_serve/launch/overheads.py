"""What a request takes besides its stages: real deployments of one's own model, asked one request at a time.

The stages' times are known by then (``worker/grid.py``). What a monolithic deployment takes longer is the gateway,
HTTP and the preparation of images; what stages apart take longer than that is their talking to each other,
measured while D streams to somebody else, as it does wherever it matters. On a CPU all of that takes cores from
the stages, so its CPU time is measured too (``host_time.py``). Queues are the simulator's to find.
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
from statistics import fmean, linear_regression, median
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import msgspec
from rich.console import Console

from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.progress import Progress
from epd_serve.bench.session import Session
from epd_serve.bench.types import Record, RunSettings
from epd_serve.bench.utilisation import LocalServer
from epd_serve.bench.workloads import load_workload
from epd_serve.config import change_config, parse_config
from epd_serve.cost.profile import HostTime, Profile, Transport
from epd_serve.launch.fairness import measure_fairness
from epd_serve.launch.host_time import Answers, host_times, split_times

#: Requests of each kind, one after the other, in each deployment.
NUM_REQUESTS = 12
NUM_OUTPUT = 24
#: Sides of square images as they are sent.
SIDES = (256, 1024)
TEXT, LONG_TEXT = 10, 256
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
        idle_cores = ask.idle_cores()
        whole = _measure(ask, has_images, options.num_requests)
        together = [(1, whole["text"])]
        together += [(count, ask(_text(TEXT, 4 * NUM_OUTPUT), 2 * count, f"closed:{count}")) for count in TOGETHER]
    request_s = max(_beyond(whole["text"], profile), 0.0)
    known = msgspec.structs.replace(profile, request_s=request_s)
    image_s, image_pixel_s = _images(whole, known)
    loop_s, stream_s = _loop(together, profile)
    known = msgspec.structs.replace(
        known, image_s=image_s, image_pixel_s=image_pixel_s, loop_s=loop_s, stream_s=stream_s
    )
    if options.device == "cpu":  # where the host's work takes cores from the stages
        asked = [*whole.values(), *(answers for _, answers in together[1:])]
        host, client = host_times(asked)
        fair_to = measure_fairness(len(os.sched_getaffinity(0)))
        known = msgspec.structs.replace(known, host=host, client=client, fair_to=fair_to)
    apart = _Apart(known, whole, idle_cores)
    line = "E-P-D" if has_images else "P-D"
    with _asked(line, options, progress) as ask:
        known = known.with_transport(apart.measure(ask, options.num_requests, Transport()))
    if not options.mooncake:
        return known
    with _asked(line, options, progress, _MOONCAKE) as ask:
        link = profile.transports["mooncake"]
        return msgspec.structs.replace(
            known, transports={"mooncake": apart.measure(ask, options.num_requests, link)}
        )


def _measure(ask: _Asker, has_images: bool, count: int) -> dict[str, Answers]:
    asked = {"text": ask(_text(TEXT), count), "long": ask(_text(LONG_TEXT), count)}
    if has_images:
        asked |= {f"{side}": ask(_image(side), count, side=side) for side in SIDES}
    return asked


def _text(num_tokens: int, num_output: int = NUM_OUTPUT, images: int = 0) -> str:
    return f"synthetic,text_tokens={num_tokens},output_tokens={num_output},image_share={images}"


def _image(side: int) -> str:
    return f"{_text(TEXT, images=1)},image_size={side}x{side}"


@dataclass(frozen=True, slots=True)
class _Apart:
    """What stages in different instances take longer than those of a monolithic one, and more CPU time.

    Attributes:
        idle_cores: that the gateway and an instance with nothing to do keep busy.
    """

    profile: Profile
    whole: dict[str, Answers]
    idle_cores: float

    def measure(self, ask: _Asker, count: int, link: Transport) -> Transport:
        """``link`` with the rest measured."""
        profile, has_images = self.profile, bool(self.profile.encode)
        idle_cores = ask.idle_cores()
        apart = _measure(ask, has_images, count)
        with ask.busy():
            beside_d = _measure(ask, has_images, count)
        token_s = max(_longer(apart, "long") - _longer(self.whole, "long"), 0.0) / (LONG_TEXT - TEXT)
        gaps = [_first_gap_s(one, profile) for some in beside_d.values() for one in some.records]
        known = msgspec.structs.replace(
            link,
            split_s=max(_beyond(beside_d["text"], profile), 0.0),
            split_token_s=token_s,
            hand_over_s=max(median(gaps), 0.0),
            feature_s=max(median(_beyond(apart[f"{side}"], profile, token_s) for side in SIDES), 0.0)
            if has_images
            else 0.0,
        )
        if profile.host == HostTime():
            return known
        request_s, token_cpu_s, image_s = split_times(list(apart.values()), list(self.whole.values()))
        return msgspec.structs.replace(
            known,
            split_cpu_s=request_s,
            split_token_cpu_s=token_cpu_s,
            feature_cpu_s=image_s,
            idle_cores=max(idle_cores - self.idle_cores, 0.0) / (ask.num_instances - 1),
        )


_MOONCAKE = {
    "feature_store": "mooncake",
    "mooncake": {"protocol": "tcp"},
    "instances": {"kv_transfer": {"transport": "mooncake"}},
}
_STREAMS = _text(TEXT, 512), 100
_IDLE_S = 3.0
_BUSY_TIMEOUT_S = 60.0
_RUNNING = re.compile(r"^epd_serve_in_flight_calls\{[^}]*\} (\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asker:
    """A deployment that is up."""

    topology: str
    num_instances: int
    url: str
    folder: Path
    progress: Callable[[str], None]
    #: Each measurement has its own, so that no picture and no prompt is in a cache from an earlier one.
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, workload: str, count: int, arrivals: str = "closed:1", side: int = 0) -> Answers:
        """``count`` requests of a workload. Raises ValueError unless all are answered."""
        self.progress(f"{self.topology}: {workload}, {arrivals}")
        quiet = Console(file=StringIO())
        session = Session(progress=lambda title, number, done: Progress(quiet, title, number, done))
        settings = RunSettings(
            base_url=self.url,
            model="profile",
            workload=workload,
            num_requests=count,
            seed=next(self.seeds),
            arrivals=arrivals,
            num_warmups=2,
        )
        path = Path(tempfile.mkdtemp(dir=self.folder))
        run, _ = session.begin(path, settings, load_workload(workload))
        try:
            return Answers.of(run, side)
        except ValueError as error:
            raise ValueError(f"{self.topology}: {error}") from None

    def idle_cores(self) -> float:
        """That its processes keep busy while nobody asks."""
        server = LocalServer("127.0.0.1", urlsplit(self.url).port or 0)
        before_s, began_s = sum(server.cpu_seconds().values()), time.monotonic()
        time.sleep(_IDLE_S)
        return (sum(server.cpu_seconds().values()) - before_s) / (time.monotonic() - began_s)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Another client has texts streamed to it, one after the other."""
        workload, count = _STREAMS
        command = [sys.executable, "-m", "epd_serve.cli", "bench", "--base-url", self.url, "--model", "profile"]
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

    def _num_running(self) -> int:
        """Calls that the gateway has under way."""
        page: bytes = build_opener(ProxyHandler({})).open(f"{self.url}/metrics", timeout=10).read()
        return sum(map(int, _RUNNING.findall(page.decode())))

    def _wait_busy(self, before: int) -> None:
        """Until the gateway has more than that under way: the other client takes a while to start."""
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while (now := self._num_running()) <= before:
            before = min(before, now)
            if time.monotonic() > deadline:
                raise ValueError(f"{self.topology}: the client that keeps a stage busy sent nothing")
            time.sleep(0.05)


@contextmanager
def _asked(
    topology: str, options: OverheadOptions, progress: Callable[[str], None], changes: dict[str, Any] | None = None
) -> Iterator[_Asker]:
    on_one = options.device != "cpu" and topology != "EPD"
    deployment = {
        "topology": f"({topology})" if on_one else topology,
        "model": options.model,
        "served_model_name": "profile",
        "devices": [options.device],
        "dtype": options.dtype,
        "instances": {} if options.threads is None else {"threads": options.threads},
    }
    config = parse_config(json.dumps(deployment), source="the profile's deployment")  # JSON is YAML
    if changes is not None:
        config = change_config(config, changes)
    with tempfile.TemporaryDirectory(prefix="epd-serve-profile-") as folder:
        progress(f"{topology}: starting")
        candidate = Candidate(file=Path(folder) / "deployment.yaml", label=topology, config=config)
        with deployed(candidate, Path(folder) / "up.log") as url:
            yield _Asker(
                topology=topology,
                num_instances=len(config.placement()),
                url=url,
                folder=Path(folder),
                progress=progress,
            )


def _beyond(answers: Answers, profile: Profile, split_token_s: float = 0.0) -> float:
    """Seconds until the first token beyond what the profile knows; the median."""

    def known_s(one: Record) -> float:
        num_tokens = one.num_prompt_tokens or 1
        seconds = profile.request_s + profile.step_s(num_tokens, 1, 0, num_tokens**2)
        if answers.side:
            seconds += profile.prepare_s(answers.side**2) + profile.encode_s([answers.side**2])
        return seconds + split_token_s * num_tokens

    return median((one.ttft_s or 0.0) - known_s(one) for one in answers.records)


def _images(whole: dict[str, Answers], profile: Profile) -> tuple[float, float]:
    """For each image, and for each pixel of it as it was sent."""
    if not profile.encode:
        return 0.0, 0.0
    small, large = (_beyond(whole[f"{side}"], profile) for side in SIDES)
    pixels = [side * side for side in SIDES]
    pixel_s = max((large - small) / (pixels[1] - pixels[0]), 0.0)
    return max(small - pixel_s * pixels[0], 0.0), pixel_s


def _longer(measured: dict[str, Answers], name: str) -> float:
    """Seconds to the first token beyond those of a short text; the median."""
    text_s = median(one.ttft_s or 0.0 for one in measured["text"].records)
    return max(median(one.ttft_s or 0.0 for one in measured[name].records) - text_s, 1e-6)


def _first_gap_s(record: Record, profile: Profile) -> float:
    """Beyond a step of two sequences and the half of one that was under way."""
    context = record.num_prompt_tokens or 1
    return record.itl_s[0] - 1.5 * profile.step_s(2, 2, 2 * context) - profile.handshake_s


def _loop(measured: Sequence[tuple[int, Answers]], profile: Profile) -> tuple[float, float]:
    """Of a decode step besides the model: a part for the step and one for each of its sequences."""
    beyond: list[float] = []
    for count, answers in measured:
        context = median((one.num_prompt_tokens or 0) + one.num_output_tokens / 2 for one in answers.records)
        tpot_s = median(one.tpot_s or 0.0 for one in answers.records)
        beyond.append(tpot_s - profile.step_s(count, count, count * context))
    counts = [count for count, _ in measured]
    slope, base = linear_regression(counts, beyond)
    if base < 0:
        base, slope = 0.0, fmean(seconds / count for seconds, count in zip(beyond, counts, strict=True))
    return max(base, 0.0), max(slope, 0.0)
