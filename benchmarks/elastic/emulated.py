"""Eight emulated devices under a trace whose mix changes, with the controller and without it.

All but the chips is real. Devices are :data:`SLOWNESS` times as slow as an Ascend 910B3, so that this machine's
cores carry the tokens that eight of them make: what an instance can do, and what the limits allow, shrink alike.
Answers are hashes of their requests: one that differs between the runs is wrong in one of them.
"""

from __future__ import annotations

import io
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from benchmarks.common import machine
from benchmarks.gateway.programs import free_ports
from benchmarks.loads import run_load
from device.emulated.timeline import EMULATED_FAULTS
from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.types import Item, Media, Message, Record
from epd_serve.bench.workloads.synthetic import text_of
from epd_serve.config import load_config

START, SLOWNESS = "2E-2P-4D", 8.0
TTFT_S, TPOT_S = 4.0, 0.16
#: So many times faster than the hour for which the trace stands do its phases and the controller go.
COMPRESSION = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A third of the trace. ``size``: of each request's picture, in pixels; (0, 0): it has none."""

    name: str
    rate: float
    num_text_tokens: int
    size: tuple[int, int]
    num_output_tokens: int


#: What each asks of one stage is more than the first layout has, and less than eight devices have.
PHASES = (
    Phase(name="text-heavy", rate=4.0, num_text_tokens=1500, size=(0, 0), num_output_tokens=32),
    Phase(name="image-heavy", rate=5.0, num_text_tokens=32, size=(1344, 896), num_output_tokens=16),
    Phase(name="long-decode", rate=3.0, num_text_tokens=64, size=(0, 0), num_output_tokens=256),
)


class ChangingMix:
    """The trace as a workload: Poisson arrivals, one phase after the other, ``seconds`` in all."""

    name = "changing-mix"

    def __init__(self, seconds: float, seed: int) -> None:
        draw = random.Random(seed)
        self.arrivals: list[tuple[float, Phase]] = []
        for number, phase in enumerate(PHASES):
            at_s, end_s = number * seconds / len(PHASES), (number + 1) * seconds / len(PHASES)
            while (at_s := at_s + draw.expovariate(phase.rate)) < end_s:
                self.arrivals.append((at_s, phase))
        self.num_items: int | None = len(self.arrivals)

    def items(self, seed: int) -> Iterator[Item]:
        first_s = self.arrivals[0][0]
        for index, (at_s, phase) in enumerate(self.arrivals):
            text = text_of(phase.num_text_tokens, random.Random(f"{seed} {index}"))
            pictures = [_picture(index, seed, phase.size)] if phase.size[0] else []
            yield Item(
                index=index,
                messages=(Message(role="user", parts=(*pictures, text)),),
                max_tokens=phase.num_output_tokens,
                workload=self.name,
                modality="image" if pictures else "text",
                arrival_s=at_s - first_s,
                fields={"ignore_eos": True, "temperature": 0},
            )


def _picture(index: int, seed: int, size: tuple[int, int]) -> Media:
    """A picture of one color, which no other has: emulated towers go by the size alone."""
    file = io.BytesIO()
    Image.new("RGB", size, (index % 256, index // 256, seed % 256)).save(file, "PNG")
    return Media(mime="image/png", data=file.getvalue())


def config(admin_port: int, *, controlled: bool) -> dict[str, Any]:
    return {
        "topology": START,
        "devices": ["emulated:ascend-910b3 x 8"],
        "model": {"shape_of": "qwen2.5-vl-7b"},
        "slo": {"ttft_ms": 1e3 * TTFT_S, "tpot_ms": 1e3 * TPOT_S},
        "gateway": {"port": 0, "admin": {"port": admin_port}},
        "instances": {"base_port": 0, "max_num_seqs": 16, "max_num_batched_tokens": 2048},
        "elastic": {"cooldown_s": 2.0} if controlled else None,
    }


def run(mix: ChangingMix, seed: int, directory: Path, *, controlled: bool) -> tuple[list[Record], dict[str, Any]]:
    """All requests, in a deployment of its own; the switches, and the share of the cores that was busy."""
    name, port = "with" if controlled else "without", free_ports(1)[0]
    file = directory / f"{name}.yaml"
    file.write_text(json.dumps(config(port, controlled=controlled)), encoding="utf-8")  # JSON is YAML
    with deployed(Candidate(file=file, label=name, config=load_config(file)), directory / f"{name}.log") as url:
        began, sent = time.time(), {"workload": mix.name, "num_requests": len(mix.arrivals), "seed": seed}
        records, busy = run_load(url, mix, directory / name, **sent, arrivals="trace", label=name)
        decisions = httpx.get(f"http://127.0.0.1:{port}/elastic", trust_env=False).json()["decisions"]
    switches = [
        {"at_s": round(one["time"] - began, 1), **one["order"], "reason": one["reason"]}
        for one in decisions
        if one["order"] is not None
    ]
    return records, {"host_busy": busy, "switches": switches}


def is_good(record: Record) -> bool:
    """Whether it kept both limits, the first from when it was to be sent."""
    ttft_s, tpot_s = record.ttft_scheduled_s, record.tpot_s
    return record.succeeded and ttft_s is not None and ttft_s <= TTFT_S and (tpot_s is None or tpot_s <= TPOT_S)


def figures(records: Sequence[Record], mix: ChangingMix, seconds: float) -> dict[str, Any]:
    good = Counter(mix.arrivals[one.index][1].name for one in records if is_good(one))
    sent = Counter(phase.name for _, phase in mix.arrivals)
    lost = [one for one in records if not one.succeeded]
    return {
        "goodput": good.total() / seconds,
        "attained": {name: good[name] / count for name, count in sent.items()},
        "lost": len(lost) + len(mix.arrivals) - len(records),
        "first_loss": f"{lost[0].failure}: {lost[0].detail}" if lost else None,
    }


def num_wrong(mix: ChangingMix, *runs: Sequence[Record]) -> int:
    """Requests whose answers differ between the runs, or are not as long as asked for."""
    texts: dict[int, set[str]] = {}
    wrong: set[int] = set()
    for one in (one for records in runs for one in records if one.succeeded):
        texts.setdefault(one.index, set()).add(one.text)
        if one.num_output_tokens != mix.arrivals[one.index][1].num_output_tokens:
            wrong.add(one.index)
    return len(wrong | {index for index, found in texts.items() if len(found) > 1})


def measure(seconds: float, seed: int) -> dict[str, Any]:
    mix = ChangingMix(seconds, seed)
    with tempfile.TemporaryDirectory(prefix="epd-serve-elastic-") as name:
        directory = Path(name)
        faults = directory / "faults.json"
        faults.write_text(json.dumps({"*": {"slowness": SLOWNESS}}), encoding="utf-8")
        os.environ[EMULATED_FAULTS] = str(faults)
        try:
            runs = {
                controlled: run(mix, seed, directory, controlled=controlled)
                for controlled in (seed % 2 == 0, seed % 2 == 1)
            }
        finally:
            del os.environ[EMULATED_FAULTS]
    return {
        "seed": seed,
        "machine": machine(),
        "devices": f"8 x emulated ascend-910b3, {SLOWNESS:g} times as slow",
        "start": START,
        "seconds": seconds,
        "compression": COMPRESSION,
        "slo": {"ttft_s": TTFT_S, "tpot_s": TPOT_S},
        "requests": len(mix.arrivals),
        "wrong": num_wrong(mix, *(records for records, _ in runs.values())),
        **{
            "with" if controlled else "without": {**figures(records, mix, seconds), **about}
            for controlled, (records, about) in runs.items()
        },
    }
