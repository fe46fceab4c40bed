"""One measurement for all papers: a deployment on emulated devices under a load, in the paper's units.

Devices are slower than their data sheets by a factor, rates are divided by it and links and limits go with it, so
that this machine's cores carry the gateway, the schedulers and the transfers. Times are divided by the factor and
rates multiplied again: a host that costs nothing would leave no trace. How idle it was stands beside the figures.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import msgspec
from PIL import Image

from benchmarks.common import machine, slowed, write
from benchmarks.loads import run_load
from device.datasheets import spec_of
from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.summary import percentile
from epd_serve.bench.types import Media, Record
from epd_serve.bench.workloads import load_workload
from epd_serve.bench.workloads.notation import Size
from epd_serve.config import load_config
from epd_serve.cost.profile import Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of

Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]
#: Of the time between tokens of a request this share must keep the limit (TriInfer, section 2.2).
GAPS_SHARE = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """``of_gaps``: ``tpot_ms`` is for :data:`GAPS_SHARE` of a request's gaps, not for their mean."""

    ttft_ms: float
    tpot_ms: float
    of_gaps: bool = False

    def __str__(self) -> str:
        return f"{self.ttft_ms:g}/{self.tpot_ms:g}"

    def kept_by(self, record: Record, slowness: float) -> bool:
        if not record.succeeded or record.ttft_scheduled_s is None:
            return False
        token_s = percentile(sorted(record.itl_s) or [0.0], GAPS_SHARE) if self.of_gaps else record.tpot_s
        ttft_ms, tpot_ms = (1e3 / slowness * (value or 0.0) for value in (record.ttft_scheduled_s, token_s))
        return ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests as ``epd-serve bench`` names them.

    Attributes:
        rate: requests a second of the paper's clock, at random times; None: ``clients`` at once, each with its
            next request when it has an answer.
    """

    name: str
    workload: str
    num_requests: int
    rate: float | None = None
    clients: int = 1
    limits: tuple[Limits, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A deployment of a paper.

    Attributes:
        name: as the paper's table has it.
        devices: the times of each of the topology's devices; several chips of one instance are one device.
        slo: limits that steps are sized by; None: steps are not limited.
        options: others of the deployment file.
    """

    name: str
    topology: str
    devices: tuple[Profile, ...]
    shape: str
    slowness: float
    loads: tuple[Load, ...]
    slo: Limits | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_chips(self) -> int:
        return sum(one.tensor_parallel for one in self.devices)

    def config(self, directory: Path) -> dict[str, Any]:
        """The deployment file; the devices that it names are written to ``directory``."""
        names = []
        for index, profile in enumerate(self.devices):
            file = directory / f"{profile.device}-tp{profile.tensor_parallel}-{index}.json"
            file.write_bytes(slowed(profile, self.slowness).to_json())
            names.append(f"emulated:{file}:{index}")
        instances = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
        tree: dict[str, Any] = {
            "topology": self.topology,
            "devices": names,
            "model": {"shape_of": self.shape},
            "gateway": {"queue_timeout_s": 600},
            "instances": instances,
        }
        if self.slo is not None:
            limits = {"ttft_ms": self.slo.ttft_ms, "tpot_ms": self.slo.tpot_ms}
            tree["slo"] = {name: self.slowness * limit for name, limit in limits.items()}
        for key, value in self.options.items():
            tree[key] = {**tree.get(key, {}), **value}
        return tree


def sheet(shape: str, kind: str, width: int = 1, *, turns: bool = False) -> Profile:
    """The times of ``width`` chips together by their data sheet; the host's part of a step is real."""
    profile = analytic_profile(shape_of(shape), replace(spec_of(kind), launch_s=0.0), width)
    # what was measured wants the whole device: two stages have half of the time each (TriInfer, section 5.6)
    return msgspec.structs.replace(profile, kind="measured") if turns else profile


def picture(size: Size, rng: Random) -> Media:
    """A picture that no other one is like: emulated towers go by the size alone."""
    image = Image.new("RGB", size, tuple(rng.randbytes(3)))
    image.putpixel((0, 0), tuple(rng.randbytes(3)))
    data = io.BytesIO()
    image.save(data, "PNG")
    return Media(mime="image/png", data=data.getvalue())


def judged(records: Sequence[Record], deployment: Deployment, load: Load) -> Row:
    """The figures of a run, in the paper's units; rates and throughput are of one chip."""
    slowness = deployment.slowness
    seconds = (max(one.finish_s for one in records) - min(one.scheduled_s for one in records)) / slowness
    answered = [one for one in records if one.succeeded]

    def per_chip(some: Sequence[Record]) -> float:
        return sum(one.num_output_tokens for one in some) / seconds / deployment.num_chips

    figures: Row = {"failed": len(records) - len(answered), "throughput": per_chip(answered)}
    for name, values in (
        ("ttft_ms", [one.ttft_scheduled_s for one in answered if one.ttft_scheduled_s is not None]),
        ("tpot_ms", [one.tpot_s for one in answered if one.tpot_s is not None]),
    ):
        ordered = [1e3 / slowness * value for value in sorted(values)] or [0.0]
        figures[name] = fmean(ordered)
        figures[f"{name}_p50"], figures[f"{name}_p90"] = percentile(ordered, 50), percentile(ordered, 90)
    good = {str(one): [record for record in records if one.kept_by(record, slowness)] for one in load.limits}
    figures["attained"] = {name: len(some) / len(records) for name, some in good.items()}
    figures["effective"] = {name: per_chip(some) for name, some in good.items()}
    return figures


def measure(deployment: Deployment, load: Load, url: str, directory: Path, seed: int) -> Row:
    records, busy = run_load(
        url,
        load_workload(load.workload, picture),
        directory / "runs",
        workload=load.workload,
        num_requests=load.num_requests,
        seed=seed,
        arrivals=f"closed:{load.clients}" if load.rate is None else "poisson",
        rate=None if load.rate is None else load.rate / deployment.slowness,
        num_warmups=2,
        timeout_s=1800,
        label=f"{deployment.name} {load.name}",
    )
    about = {
        "deployment": deployment.name,
        "topology": deployment.topology,
        "devices": [f"{one.tensor_parallel} x emulated {one.device}" for one in deployment.devices],
        "shape": deployment.shape,
        "slowness": deployment.slowness,
        "load": load.name,
        "workload": load.workload,
        "rate": load.rate,
        "requests": len(records),
    }
    return {**about, **judged(records, deployment, load), "host_idle": 1 - busy}


def read(output: Path) -> Rows:
    """The rows that are there."""
    if not output.exists():
        return {}
    content = json.loads(output.read_text(encoding="utf-8"))
    return {(row["deployment"], row["load"]): row for row in content["rows"]}


def go_on(deployments: Sequence[Deployment], output: Path, command: str, until_s: float) -> int:
    """Make the runs that are not in ``output`` yet, until the time is up; the number that is left."""
    rows = read(output)
    missing = {one.name: [load for load in one.loads if (one.name, load.name) not in rows] for one in deployments}
    for one in deployments:
        if not missing[one.name] or time.monotonic() > until_s:
            continue
        with tempfile.TemporaryDirectory(prefix="epd-serve-papers-") as name:
            directory = Path(name)
            file = directory / "deployment.yaml"
            file.write_text(json.dumps(one.config(directory)), encoding="utf-8")  # JSON is YAML
            candidate = Candidate(file=file, label=one.name, config=load_config(file))
            with deployed(candidate, directory / "up.log") as url:
                for load in list(missing[one.name]):
                    if time.monotonic() > until_s:
                        break
                    row = measure(one, load, url, directory, seed=one.loads.index(load))
                    rows[one.name, load.name] = row
                    missing[one.name].remove(load)
                    write(output, {"command": command, "machine": machine(), "rows": list(rows.values())})
                    print(json.dumps(row), flush=True)
    return sum(map(len, missing.values()))


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; columns behind the first are numbers."""
    rules = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *lines)) + "\n"
