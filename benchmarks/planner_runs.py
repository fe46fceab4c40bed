"""Measured runs of every CPU deployment in ``deploy/``, for the simulator to be held against.

    python -m benchmarks.planner_runs take WORK_DIR [--files A.yaml,B.yaml] [--workload W] [--rates 2,4,6,8]
    python -m benchmarks.planner_runs keep WORK_DIR

``take`` makes a model with random weights (six layers, so that stages take much longer than HTTP does), gives
every instance one thread, and lets ``epd-serve bench --compare`` measure; it may be called several times with
parts of the deployments and the loads. ``keep`` writes what the simulator needs of all runs to
``results/planner-runs.json``: of each request when it was sent, its sizes and its times.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from PIL import Image

from benchmarks.transfer_models import make_model
from epd_serve.bench.compare import read_comparison
from epd_serve.bench.deployed import read_candidates
from epd_serve.bench.plan import take_items
from epd_serve.bench.results import file_name
from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.types import Item, Media
from epd_serve.bench.workloads import load_workload
from epd_serve.config import change_config, load_config

ROOT = Path(__file__).parents[1]
RUNS = Path(__file__).parent / "results" / "planner-runs.json"
#: Of an idle EPD instance about four times the time to the first token and 2.5 times that per token.
TTFT_MS, TPOT_MS = 600, 15
WORKLOADS = ("sharegpt4o-like", "visualwebinstruct-like")


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
    requests: list[Asked]


def make_runs_model(path: Path) -> Path:
    """The model of all measured runs."""
    sizes = {"hidden": 384, "layers": 6, "heads": 12, "kv_heads": 4, "intermediate": 1152}
    return make_model(path, **sizes, vision_layers=4, vision_hidden=256, max_pixels=448 * 448)


def take(
    work_dir: Path, files: list[Path], workloads: list[str], rates: str, duration_s: float, seed: int
) -> None:
    model = work_dir / "model"
    if not (model / "config.json").exists():
        make_runs_model(model)
    for workload in workloads:
        with tempfile.TemporaryDirectory() as folder:
            changed = []
            for file in files:
                config = change_config(load_config(file), {"model": str(model), "instances": {"threads": 1}})
                changed.append(Path(folder) / file.name)
                changed[-1].write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")
            command = ["bench", "--compare", ",".join(map(str, changed)), "--workload", workload]
            command += ["--rates", rates, "--duration", str(duration_s), "--seed", str(seed), "--no-report"]
            command += ["--slo-ttft-ms", str(TTFT_MS), "--slo-tpot-ms", str(TPOT_MS)]
            command += ["--work-dir", str(work_dir / "runs")]
            subprocess.run([sys.executable, "-m", "epd_serve.cli", *command], check=True)


def keep(work_dir: Path) -> list[MeasuredRun]:
    runs = []
    for file in sorted((work_dir / "runs").glob("*/*/*/run.json")):
        run = RunDirectory.open(file.parent)
        names = [Path(name).name for name in read_comparison(file.parents[2]).files]
        of_label = {
            file_name(one.label): one.file.name
            for one in read_candidates([ROOT / "deploy" / name for name in names])
        }
        runs.append(kept(run, of_label[file.parents[1].name]))
    return sorted(runs, key=lambda one: (one.workload, one.file, one.rate))


def kept(run: RunDirectory, deployment: str) -> MeasuredRun:
    """What the simulator needs of a run; ``deployment``: its file."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["take", "keep"])
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--files", default=",".join(map(str, sorted((ROOT / "deploy").glob("cpu-*.yaml")))))
    parser.add_argument("--workload", default=",".join(WORKLOADS))
    parser.add_argument("--rates", default="2,4,6,8")
    parser.add_argument("--duration", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    if wanted.what == "take":
        files = [Path(file) for file in wanted.files.split(",")]
        take(wanted.work_dir, files, wanted.workload.split(","), wanted.rates, wanted.duration, wanted.seed)
        return
    runs = keep(wanted.work_dir)
    RUNS.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(one) for one in runs) + b"\n]\n")
    print(f"{len(runs)} runs, {sum(len(one.requests) for one in runs)} requests in {RUNS}")


if __name__ == "__main__":
    main()
