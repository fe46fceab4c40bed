"""Measured runs of every CPU deployment in ``deploy/``, for the simulator to be held against.

    python -m benchmarks.planner_runs take WORK_DIR --rounds 4,5 --duration 10 [--files A.yaml,B.yaml]
    python -m benchmarks.planner_runs keep WORK_DIR [--add]

``take`` makes a model with random weights (six layers, so that stages take much longer than HTTP does), gives
every instance one thread, and sends each load to each deployment. Rounds have other requests at other times, and
in each all deployments get the same ones. The deployments of a round come in an order of its own, anew for each
workload, so that a machine that gets slower meanwhile is not taken for a slow deployment. It measures a profile
before the first round and behind each one, so that profiles and runs have seen the same machine. Called again it
goes on: what is there is kept.
``keep`` writes what the simulator needs of all runs to ``results/planner-runs.json`` (of each request when it was
sent, its sizes and its times), and the mean of the profiles to ``results/profile-runs-cpu.json``; with ``--add``
the rounds that were there stay, which is right only where the same profile holds for them.
"""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from PIL import Image
from rich.console import Console

from benchmarks.common import RESULTS, ROOT, argument_parser
from benchmarks.models import make_model
from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.plan import take_items
from epd_serve.bench.run_directory import RunDirectory, new_directory
from epd_serve.bench.session import Session
from epd_serve.bench.types import Item, Media, RunSettings
from epd_serve.bench.workloads import load_workload
from epd_serve.config import change_config, load_config
from epd_serve.cost.profile import Profile

RUNS = RESULTS / "planner-runs.json"
PROFILE = RUNS.with_name("profile-runs-cpu.json")
#: Of an idle EPD instance there about four times the time to the first token, and 2.5 times that per token.
TTFT_MS, TPOT_MS = 900, 23
WORKLOADS = ("sharegpt4o-like", "visualwebinstruct-like")
#: Deployments begin to lose a tenth of their requests between the first and the last one.
RATES = (1.0, 1.5, 2.0, 3.0)


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """One request and what became of it, in seconds from the run's first one; a failed one has no tokens.

    Attributes:
        pixels: of its image as it was sent, 0 without one.
    """

    sent_s: float
    pixels: int
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float
    tpot_s: float
    finish_s: float


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """``file``: of the deployment, in ``deploy/``."""

    file: str
    topology: str
    workload: str
    rate: float
    round: int = 0
    requests: list[Asked]


def make_runs_model(path: Path) -> Path:
    """The model of all measured runs."""
    sizes = {"hidden": 384, "layers": 6, "heads": 12, "kv_heads": 4, "intermediate": 1152}
    return make_model(path, **sizes, vision_layers=4, vision_hidden=256, max_pixels=448 * 448)


def take(work_dir: Path, files: list[Path], duration_s: float, rounds: Sequence[int]) -> None:
    model = work_dir / "model"
    if not (model / "config.json").exists():
        make_runs_model(model)
    if not _profiles(work_dir):
        _take_profile(work_dir, model, "before")
    for number in rounds:
        _take_round(work_dir, files, duration_s, number)
        _take_profile(work_dir, model, f"{number}")


def _take_profile(work_dir: Path, model: Path, name: str) -> None:
    profile = work_dir / f"profile-{name}.json"
    if not profile.exists():
        command = ["profile", str(profile), "--model", str(model), "--threads", "1", "--mooncake"]
        subprocess.run([sys.executable, "-m", "epd_serve.cli", *command], check=True)


def _profiles(work_dir: Path) -> list[Path]:
    return sorted(work_dir.glob("profile-*.json"))


def _take_round(work_dir: Path, files: Sequence[Path], duration_s: float, number_of_round: int) -> None:
    session = Session(console=Console())
    there = {_key(run.settings) for run in _runs(work_dir)}
    for file, workload in in_order(files, number_of_round):
        missing = [
            settings
            for settings in _loads(file, workload, duration_s, number_of_round)
            if _key(settings) not in there
        ]
        if not missing:
            continue
        model = str(work_dir / "model")
        config = change_config(load_config(file), {"model": model, "instances": {"threads": 1}})
        candidate = Candidate(file=file, label=file.name, config=config)
        with deployed(candidate, work_dir / f"{file.stem}.log") as url:
            for settings in missing:
                settings = msgspec.structs.replace(settings, base_url=url)
                session.begin(new_directory(work_dir / "runs"), settings, load_workload(workload))


def in_order(files: Sequence[Path], number_of_round: int) -> list[tuple[Path, str]]:
    """Deployments and workloads as a round takes them: one workload behind the other, deployments shuffled."""
    draw = random.Random(number_of_round)
    return [(file, workload) for workload in WORKLOADS for file in draw.sample(list(files), len(files))]


def _loads(file: Path, workload: str, duration_s: float, number_of_round: int) -> list[RunSettings]:
    """The runs of one deployment in a round; its URL is not known yet."""
    first = len(RATES) * WORKLOADS.index(workload)
    return [
        RunSettings(
            base_url="",
            model="",
            workload=workload,
            num_requests=round(rate * duration_s),
            seed=100 * number_of_round + first + number,  # no picture is in a cache from an earlier run
            arrivals="poisson",
            rate=rate,
            num_warmups=2,
            label=file.name,
        )
        for number, rate in enumerate(RATES)
    ]


def _key(settings: RunSettings) -> tuple[str, str, int, int]:
    return settings.label, settings.workload, settings.seed, settings.num_requests


def _runs(work_dir: Path) -> list[RunDirectory]:
    """Those that came to their end."""
    found = [RunDirectory.open(file.parent) for file in (work_dir / "runs").glob("*/run.json")]
    return [run for run in found if len(run.records()) == run.settings.num_requests]


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Each number the mean of theirs, which are of one model on one machine."""
    found: Profile = _mean(profiles)
    return found


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, msgspec.Struct):
        names = first.__struct_fields__
        return type(first)(**{name: _mean([getattr(one, name) for one in values]) for name in names})
    if isinstance(first, dict):
        return {key: _mean([one[key] for one in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(some) for some in zip(*values, strict=True))
    return fmean(values) if isinstance(first, float) else first


def keep(work_dir: Path) -> list[MeasuredRun]:
    return [kept(run, run.settings.label) for run in _runs(work_dir)]


def kept(run: RunDirectory, deployment: str) -> MeasuredRun:
    """A run as the simulator needs it; ``deployment``: its file."""
    settings = run.settings
    items = take_items(load_workload(settings.workload), settings.num_requests, settings.seed)
    pixels = [_pixels(item) for item in items]
    records = [one for one in run.records() if one.sent_s is not None]
    begin_s = min(one.sent_s for one in records if one.sent_s is not None)
    return MeasuredRun(
        file=deployment,
        topology=settings.topology or settings.label,
        workload=settings.workload,
        rate=settings.rate or 0.0,
        round=settings.seed // 100,
        requests=[
            Asked(
                sent_s=round((one.sent_s or 0.0) - begin_s, 4),
                pixels=pixels[one.index],
                num_prompt_tokens=one.num_prompt_tokens or 0,
                num_output_tokens=one.num_output_tokens if one.succeeded else 0,
                ttft_s=round(one.ttft_s or 0.0, 4),
                tpot_s=round(one.tpot_s or 0.0, 5),
                finish_s=round(one.finish_s - begin_s, 4),
            )
            for one in sorted(records, key=lambda one: one.sent_s or 0.0)
        ],
    )


def _pixels(item: Item) -> int:
    sizes = [
        Image.open(io.BytesIO(part.data)).size
        for one in item.messages
        for part in one.parts
        if isinstance(part, Media)
    ]
    return sum(width * height for width, height in sizes)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("what", choices=["take", "keep"])
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--files", default=",".join(map(str, sorted((ROOT / "deploy").glob("cpu-*.yaml")))))
    parser.add_argument("--duration", type=float, default=15)
    parser.add_argument("--rounds", default="0", help="their numbers, which seed the requests")
    parser.add_argument("--add", action="store_true", help="keep: the rounds that were kept before stay")
    wanted = parser.parse_args()
    if wanted.what == "take":
        rounds = [int(number) for number in wanted.rounds.split(",")]
        take(wanted.work_dir, [Path(file) for file in wanted.files.split(",")], wanted.duration, rounds)
        return
    runs = keep(wanted.work_dir)
    if wanted.add:
        new = {one.round for one in runs}
        old = msgspec.json.decode(RUNS.read_bytes(), type=list[MeasuredRun])
        runs += [one for one in old if one.round not in new]
    runs.sort(key=lambda one: (one.workload, one.file, one.rate, one.round))
    RUNS.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(one) for one in runs) + b"\n]\n")
    print(f"{len(runs)} runs, {sum(len(one.requests) for one in runs)} requests in {RUNS}")
    if profiles := [Profile.read(file) for file in _profiles(wanted.work_dir)]:
        PROFILE.write_bytes(mean_profile(profiles).to_json())
        print(f"the mean of {len(profiles)} profiles in {PROFILE}")


if __name__ == "__main__":
    main()
