"""Stage-level batching under a TPOT limit: how long steps take and what that costs in throughput.

Two PD instances of one model, each in a process of its own, take turns at the same mixed load: many short chats
that decode, and long prompts that arrive among them. One has ``slo.tpot_ms`` set, the other knows no limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.deployed import machine

RESULT = Path(__file__).parent / "results" / "batching-cpu.json"
POLICIES = ("stage-level", "unlimited")
#: TPOT_max as a multiple of what a step of CHATS decodes takes on this machine.
TPOT_OF_DECODE_STEP = 3.0
ROUNDS = 5
#: Clients of each kind; every one asks again as soon as it has its answer.
CHATS, DOCUMENTS = 12, 2
#: Requests of a turn, prompt tokens and answer tokens.
CHAT, DOCUMENT = (96, 64, 96), (10, 1600, 32)
MODEL = {"hidden": 384, "layers": 8, "heads": 12, "kv_heads": 4, "intermediate": 1152}


# ---------------------------------------------------------------------- the process of an instance


def instance_main(model: Path, policy: str, tpot_ms: float | None) -> None:
    """Serve the load named on each line of stdin; print its figures as a line of JSON."""
    import logging

    import torch

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    asyncio.run(_instance(model, policy, tpot_ms))


async def _instance(model: Path, policy: str, tpot_ms: float | None) -> None:
    from epd_serve.config import InstanceOptions
    from epd_serve.instance.instance import Instance
    from epd_serve.sched.language import ScheduleOutput
    from epd_serve.types import Role

    options = InstanceOptions(
        name="pd0",
        role=Role.parse("PD"),
        model=model,
        served_model_name="benchmark",
        dtype="float32",
        threads=1,
        max_num_seqs=32,
        num_blocks=4096,
        slo_tpot_ms=tpot_ms,
        batching_policy=policy,  # type: ignore[arg-type]
    )
    instance = Instance(options)
    steps: list[dict[str, float]] = []
    cpu_s = 0.0
    stepped = instance.metrics.stepped

    def record(output: ScheduleOutput, seconds: float) -> None:
        nonlocal cpu_s
        stepped(output, seconds)
        decodes, before, cpu_s = len(output.decodes), cpu_s, time.thread_time()
        # the engine's thread computes all of a step itself, and sleeps between two
        step = {"seconds": seconds, "cpu_s": cpu_s - before}
        steps.append({**step, "decodes": decodes, "prefill_tokens": output.num_tokens - decodes})

    instance.metrics.stepped = record  # type: ignore[method-assign]
    start = time.perf_counter()
    await instance.start()
    info = json.loads((await instance._info(b"")).body)
    print(json.dumps({"start_s": time.perf_counter() - start, "budgets": info["budgets"]}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        load = json.loads(line)
        steps.clear()
        start = time.perf_counter()
        answers = await _serve(instance, **load)
        figures = {"seconds": time.perf_counter() - start, "steps": list(steps), "answers": answers}
        info = json.loads((await instance._info(b"")).body)
        print(json.dumps({**figures, "budgets": info["budgets"]}), flush=True)
    await instance.close()


async def _serve(
    instance: Any, seed: int, chats: int, documents: int, clients: tuple[int, int]
) -> list[dict[str, Any]]:
    """All requests, each kind by as many clients; for each its kind and its tokens' times, from its start on."""
    from epd_serve.protocol import wire
    from epd_serve.types import SamplingParams

    rng = random.Random(seed)
    answers: list[dict[str, Any]] = []

    def requests(kind: str, count: int, num_prompt: int, num_answer: int) -> Iterator[wire.PrefillRequest]:
        for index in range(count):
            yield wire.PrefillRequest(
                request_id=f"{kind}-{seed}-{index}",
                output=wire.OutputOptions(kind="completion", id="c", created=0, model="benchmark", stream=True),
                # the first tokens of a vocabulary are its special ones
                prompt=[rng.randrange(100, 700) for _ in range(num_prompt)],
                sampling=SamplingParams(
                    seed=0, temperature=0.0, max_tokens=rng.randint(num_answer // 2, num_answer), ignore_eos=True
                ),
                items=[],
            )

    async def client(kind: str, waiting: Iterator[wire.PrefillRequest]) -> None:
        for request in waiting:
            start = time.perf_counter()
            reply = await instance.prefills().prefill(request)
            times: list[float] = []
            async for piece in reply.stream:
                times += [time.perf_counter() - start] * piece.count(b'"text"')
            reply.on_close()
            answers.append({"kind": kind, "tokens_s": times})

    async with asyncio.TaskGroup() as group:
        for kind, num_clients, waiting in (
            ("chat", clients[0], requests("chat", chats, *CHAT[1:])),
            ("document", clients[1], requests("document", documents, *DOCUMENT[1:])),
        ):
            for _ in range(num_clients):
                group.create_task(client(kind, waiting))
    return answers


# ---------------------------------------------------------------------- the comparison


class Process:
    """An instance in a process of its own."""

    def __init__(self, model: Path, policy: str, tpot_ms: float | None, cache: Path) -> None:
        limit = [] if tpot_ms is None else ["--tpot-ms", str(tpot_ms)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.batching", "--instance", str(model), "--policy", policy, *limit],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "EPD_SERVE_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        )
        self.started = self._answer()

    def turn(self, seed: int, chats: int, documents: int, clients: tuple[int, int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        load = {"seed": seed, "chats": chats, "documents": documents, "clients": clients}
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the instance has ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def summary(turn: dict[str, Any], tpot_ms: float) -> dict[str, float]:
    """Of steps in which something decodes: only they make a client wait between tokens."""
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
        "chat_ttft_p50_ms": statistics.median(first["chat"]),
        "document_ttft_p50_ms": statistics.median(first["document"]),
    }


def compare(model: Path, cache: Path) -> dict[str, Any]:
    unlimited = Process(model, "unlimited", None, cache)
    unlimited.turn(1, CHATS, 0, (CHATS, 0))
    alone = unlimited.turn(2, 4 * CHATS, 0, (CHATS, 0))["steps"]
    full = [step["seconds"] for step in alone if step["decodes"] == CHATS and not step["prefill_tokens"]]
    decode_ms = 1000 * statistics.median(full)
    tpot_ms = round(TPOT_OF_DECODE_STEP * decode_ms, 1)
    print(f"a step of {CHATS} decodes takes {decode_ms:.1f} ms; TPOT_max is {tpot_ms} ms", flush=True)
    processes = {"stage-level": Process(model, "stage-level", tpot_ms, cache), "unlimited": unlimited}
    rows: list[dict[str, Any]] = []
    all_steps: dict[str, list[dict[str, float]]] = {policy: [] for policy in processes}
    for process in processes.values():
        process.turn(3, 12, 2, (CHATS, DOCUMENTS))
    for index in range(ROUNDS):
        order = POLICIES if index % 2 == 0 else POLICIES[::-1]
        for policy in order:  # in turns: what else the machine does falls on both alike
            turn = processes[policy].turn(10 + index, CHAT[0], DOCUMENT[0], (CHATS, DOCUMENTS))
            rows.append({"round": index, "policy": policy, **summary(turn, tpot_ms), "budgets": turn["budgets"]})
            all_steps[policy] += turn["steps"]
            print(json.dumps(rows[-1]), flush=True)
    for process in processes.values():
        process.close()

    def rounds(policy: str, figure: str) -> list[float]:
        return [row[figure] for row in sorted(rows, key=lambda row: row["round"]) if row["policy"] == policy]

    def ratios(figure: str) -> list[float]:
        return [a / b for a, b in zip(*(rounds(policy, figure) for policy in POLICIES), strict=True)]

    return {
        "machine": machine(),
        "command": "python -m benchmarks.batching",
        "model": MODEL,
        "load": {
            "clients": {"chat": CHATS, "document": DOCUMENTS},
            "requests, prompt tokens, most answer tokens": {"chat": CHAT, "document": DOCUMENT},
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
        "steps: ms, CPU ms, decodes, prefill tokens": {
            policy: [
                [round(1000 * step["seconds"], 2), round(1000 * step["cpu_s"], 2), *list(step.values())[2:]]
                for step in steps
            ]
            for policy, steps in all_steps.items()
        },
    }


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for policy, steps in report["steps: ms, CPU ms, decodes, prefill tokens"].items():
        times = sorted(ms for ms, _, decodes, _ in steps if decodes)
        axes.plot(times, [(i + 1) / len(times) for i in range(len(times))], label=policy)
    axes.axvline(report["tpot_ms"], color="black", linestyle="--", label="TPOT_max")
    axes.axvline(1.2 * report["tpot_ms"], color="grey", linestyle=":", label="TPOT_max + 20 %")
    axes.set(
        xscale="log", xlabel="step with decodes, ms", ylabel="share of steps", title="Time of steps, mixed load"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    parser.add_argument("--tpot-ms", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.instance is not None:
        instance_main(arguments.instance, arguments.policy, arguments.tpot_ms)
        return
    from benchmarks.transfer_models import make_model

    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", **MODEL)
        report = compare(model, Path(directory) / "cache")
    RESULT.write_text(json.dumps(report) + "\n")
    plot(report, RESULT.with_suffix(".png"))
    print(
        f"p99 of steps over TPOT_max: {report['step_p99_over_tpot']['stage-level']:.2f} with stage-level, "
        f"{report['step_p99_over_tpot']['unlimited']:.2f} without; throughput {report['throughput_ratio']:.3f} of "
        f"unlimited batching; {RESULT.name} written"
    )


if __name__ == "__main__":
    main()
