"""Stage-level batching under a TPOT limit: how long steps take and what that costs in throughput.

    python -m benchmarks.batching

Two PD instances of one model, each in a process of its own, take turns at the same mixed load: many short chats
that decode, and long prompts that arrive among them. One has ``slo.tpot_ms`` set, the other knows no limit.

Limits are times of the clock, so a turn counts only where the instance got a core when it wanted one: a round in
which its threads waited for a core for more than ``MOST_WAITED`` of the time is repeated (on a shared machine, run
this at a raised priority). Figures are medians of the rounds that count.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.batching_instance import TOKENS
from benchmarks.common import JsonProcess, argument_parser, machine

POLICIES = ("stage-level", "unlimited")
#: TPOT_max as a multiple of what a step of all chats' decodes takes on this machine.
TPOT_OF_DECODE_STEP = 3.0
ROUNDS, MOST_TRIES = 5, 15
#: Share of a turn that counts during which threads of its instance may have waited for a core.
MOST_WAITED = 0.15
#: Clients of each kind; every one asks again as soon as it has its answer.
CLIENTS = {"chat": 12, "document": 2}
#: Requests of a turn.
CHAT, DOCUMENT = 96, 10
MODEL = {"hidden": 384, "layers": 8, "heads": 12, "kv_heads": 4, "intermediate": 1152}


class Process:
    """An instance in a process of its own."""

    def __init__(self, model: Path, tpot_ms: float | None, cache: Path) -> None:
        limit = [] if tpot_ms is None else ["--tpot-ms", str(tpot_ms)]
        command = [sys.executable, "-m", "benchmarks.batching_instance", str(model)]
        command += limit
        environment = {**os.environ, "EPD_SERVE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        self._process = JsonProcess(command, environment)
        self.started = self._known(self._process.answer())

    def turn(self, seed: int, chats: int, documents: int = 0) -> dict[str, Any]:
        """A load's figures, and the share of its time in which threads of the instance waited for a core."""
        counts = {"chat": chats, "document": documents}
        load = {kind: (count, CLIENTS[kind]) for kind, count in counts.items() if count}
        before, start = self._waited_s(), time.perf_counter()
        answer = self._known(self._process.ask({"seed": seed, "load": load}))
        return {**answer, "waited": (self._waited_s() - before) / (time.perf_counter() - start)}

    def _waited_s(self) -> float:
        """Seconds that its threads have been ready to run and did not, by the kernel's schedstat."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return 1e-9 * sum(int((task / "schedstat").read_text().split()[1]) for task in tasks)

    def close(self) -> None:
        self._process.close()

    @staticmethod
    def _known(answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            raise RuntimeError("the instance has ended")
        return answer


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def summary(turn: dict[str, Any], tpot_ms: float) -> dict[str, float]:
    """Times of steps in which something decodes: only they make a client wait between tokens."""
    steps = [1000 * step["seconds"] for step in turn["steps"] if step["decodes"]]
    cpu = [1000 * step["cpu_s"] for step in turn["steps"] if step["decodes"]]
    gaps = [
        1000 * (after - before)
        for answer in turn["answers"]
        for before, after in zip(answer["tokens_s"], answer["tokens_s"][1:], strict=False)
    ]
    first = {
        kind: [1000 * answer["tokens_s"][0] for answer in turn["answers"] if answer["kind"] == kind]
        for kind in ("chat", "document")
    }
    tokens = sum(step["decodes"] + step["prefill_tokens"] for step in turn["steps"])
    return {
        "seconds": turn["seconds"],
        "tokens_per_s": tokens / turn["seconds"],
        "tokens_per_cpu_s": tokens / sum(step["cpu_s"] for step in turn["steps"]),
        "steps": len(steps),
        "step_p50_ms": quantile(steps, 0.5),
        "step_p99_ms": quantile(steps, 0.99),
        "step_max_ms": max(steps),
        "step_cpu_p99_ms": quantile(cpu, 0.99),
        "steps_over_limit": sum(step > tpot_ms for step in steps) / len(steps),
        "steps_over_120_percent": sum(step > 1.2 * tpot_ms for step in steps) / len(steps),
        "gap_p99_ms": quantile(gaps, 0.99),
        **{f"{kind}_ttft_p50_ms": statistics.median(times) for kind, times in first.items() if times},
        "waited": turn["waited"],
    }


def compare(model: Path, cache: Path) -> dict[str, Any]:
    num_chats = CLIENTS["chat"]
    unlimited = Process(model, None, cache)
    unlimited.turn(1, num_chats)
    alone = unlimited.turn(2, 4 * num_chats)["steps"]
    full = [step["seconds"] for step in alone if step["decodes"] == num_chats and not step["prefill_tokens"]]
    decode_ms = 1000 * statistics.median(full)
    tpot_ms = round(TPOT_OF_DECODE_STEP * decode_ms, 1)
    print(f"a step of {num_chats} decodes takes {decode_ms:.1f} ms; TPOT_max is {tpot_ms} ms", flush=True)
    processes = {"stage-level": Process(model, tpot_ms, cache), "unlimited": unlimited}
    rows: list[dict[str, Any]] = []
    disturbed: list[dict[str, Any]] = []
    all_steps: dict[str, list[dict[str, float]]] = {policy: [] for policy in processes}
    for process in processes.values():
        process.turn(3, 12, 2)
    for index in range(MOST_TRIES):
        order = POLICIES if index % 2 == 0 else POLICIES[::-1]
        # in turns: what else the machine does falls on both alike
        turns = {policy: processes[policy].turn(10 + index, CHAT, DOCUMENT) for policy in order}
        of_round = [
            {"round": index, "policy": policy, **summary(turn, tpot_ms), "budgets": turn["budgets"]}
            for policy, turn in turns.items()
        ]
        counts = all(row["waited"] <= MOST_WAITED for row in of_round)
        print(json.dumps({"counts": counts, "rows": of_round}), flush=True)
        if not counts:
            disturbed += of_round
            continue
        rows += of_round
        for policy, turn in turns.items():
            all_steps[policy] += turn["steps"]
        if len(rows) == ROUNDS * len(POLICIES):
            break
    for process in processes.values():
        process.close()
    if not rows:
        raise SystemExit(
            f"the instances waited for a core for more than {MOST_WAITED:.0%} of all {MOST_TRIES} rounds; "
            "run this on a machine that is left alone, or at a raised priority"
        )

    def rounds(policy: str, figure: str) -> list[float]:
        return [row[figure] for row in sorted(rows, key=lambda row: row["round"]) if row["policy"] == policy]

    def ratios(figure: str) -> list[float]:
        return [a / b for a, b in zip(*(rounds(policy, figure) for policy in POLICIES), strict=True)]

    return {
        "machine": machine(),
        "command": "python -m benchmarks.batching",
        "role": "PD",
        "model": MODEL,
        "load": {
            "clients": CLIENTS,
            "requests": {"chat": CHAT, "document": DOCUMENT},
            "prompt tokens, most answer tokens": TOKENS,
        },
        "decode_step_ms": decode_ms,
        "tpot_ms": tpot_ms,
        "start_s": {policy: process.started["start_s"] for policy, process in processes.items()},
        "budgets": processes["stage-level"].started["budgets"],
        # medians of the rounds
        "step_p99_over_tpot": {p: statistics.median(rounds(p, "step_p99_ms")) / tpot_ms for p in POLICIES},
        "step_cpu_p99_over_tpot": {p: statistics.median(rounds(p, "step_cpu_p99_ms")) / tpot_ms for p in POLICIES},
        "throughput_ratio": statistics.median(ratios("tokens_per_s")),
        "throughput_ratio_by_cpu_time": statistics.median(ratios("tokens_per_cpu_s")),
        "rows": rows,
        "rounds left out, the instance waited for a core too often": disturbed,
        "steps: ms, CPU ms, decodes, prefill tokens": {
            policy: [
                [round(1000 * step["seconds"], 2), round(1000 * step["cpu_s"], 2), *list(step.values())[2:]]
                for step in steps
            ]
            for policy, steps in all_steps.items()
        },
    }


def main() -> None:
    parser = argument_parser(__doc__, "batching-cpu.json")
    arguments = parser.parse_args()
    from benchmarks.models import make_model

    with tempfile.TemporaryDirectory() as directory:
        report = compare(make_model(Path(directory) / "model", **MODEL), Path(directory) / "cache")
    arguments.output.write_text(json.dumps(report) + "\n")
    print(
        f"p99 of steps over TPOT_max: {report['step_p99_over_tpot']['stage-level']:.2f} with stage-level, "
        f"{report['step_p99_over_tpot']['unlimited']:.2f} without; throughput {report['throughput_ratio']:.3f} of "
        f"unlimited batching; {arguments.output.name} written"
    )


if __name__ == "__main__":
    main()
