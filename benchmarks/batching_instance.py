"""An instance as the batching benchmark's worker: reads loads from standard input, answers with their figures."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import argument_parser
from benchmarks.gateway.programs import free_ports
from epd_serve.config import InstanceOptions
from epd_serve.config.sections import SLOConfig
from epd_serve.instance.instance import Instance
from epd_serve.protocol import wire
from epd_serve.telemetry.span import Span
from epd_serve.types import Role, SamplingParams

#: Of each kind of request: prompt tokens, and the most answer tokens.
TOKENS = {"chat": (64, 96), "document": (1600, 32)}


async def run(model: Path, tpot_ms: float | None) -> None:
    """Serve the load named on each line of stdin; print its figures as a line of JSON."""
    options = InstanceOptions(
        name="pd0",
        role=Role.parse("PD"),
        port=free_ports(1)[0],
        model=model,
        served_model_name="benchmark",
        dtype="float32",
        threads=1,
        max_num_seqs=32,
        num_blocks=4096,
        slo=SLOConfig(tpot_ms=tpot_ms),
    )
    instance = Instance(options)
    steps: list[dict[str, float]] = []
    cpu_s = 0.0

    def record(span: Span) -> None:
        nonlocal cpu_s
        about = span.attributes
        if about.get("track") == "engine":
            before, cpu_s = cpu_s, time.thread_time()
            # the engine's thread computes all of a step itself, and sleeps between two
            step = {"seconds": span.seconds, "cpu_s": cpu_s - before}
            counts = {name: float(about[name]) for name in ("decodes", "prefill_tokens")}
            steps.append(step | counts)

    instance.telemetry.spans.subscribe(record)
    start = time.perf_counter()
    await instance.start()
    started = {"start_s": time.perf_counter() - start, "budgets": instance.info().budgets}
    print(json.dumps(started), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        load = json.loads(line)
        steps.clear()
        start = time.perf_counter()
        answers = await serve(instance, **load)
        figures = {"seconds": time.perf_counter() - start, "steps": list(steps), "answers": answers}
        print(json.dumps({**figures, "budgets": instance.info().budgets}), flush=True)
    await instance.close()


async def serve(instance: Instance, seed: int, load: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """All requests; for each its kind and its tokens' times, from its start on.

    Args:
        load: by kind of request how many, and by how many clients; each asks again when it has its answer.
    """
    rng = random.Random(seed)
    answers: list[dict[str, Any]] = []

    async def client(kind: str, waiting: Iterator[wire.PrefillRequest]) -> None:
        for request in waiting:
            start = time.perf_counter()
            reply = await instance.require_prefiller().prefill(request)
            times: list[float] = []
            async for piece in reply.stream:
                times += [time.perf_counter() - start] * piece.count(b'"text"')
            reply.on_close()
            answers.append({"kind": kind, "tokens_s": times})

    async with asyncio.TaskGroup() as group:
        for kind, (count, num_clients) in load.items():
            waiting = requests(rng, f"{kind}-{seed}", kind, count)
            for _ in range(num_clients):
                group.create_task(client(kind, waiting))
    return answers


def requests(rng: random.Random, name: str, kind: str, count: int) -> Iterator[wire.PrefillRequest]:
    num_prompt, num_answer = TOKENS[kind]
    for index in range(count):
        request_id = f"{name}-{index}"
        # the first tokens of a vocabulary are its special ones
        prompt = [rng.randrange(100, 700) for _ in range(num_prompt)]
        yield wire.PrefillRequest(
            request_id=request_id,
            output=wire.OutputOptions(kind="completion", id="c", created=0, model="benchmark", stream=True),
            prompt=prompt,
            sampling=SamplingParams(
                seed=0, temperature=0.0, max_tokens=rng.randint(num_answer // 2, num_answer), ignore_eos=True
            ),
            items=[],
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tpot-ms", type=float)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    asyncio.run(run(arguments.model, arguments.tpot_ms))


if __name__ == "__main__":
    main()
