"""CPU time of a step on the engine's thread, without the model: planning, packing, sampling, handing out.

Greedy sequences decode together, a step ahead of their tokens; logits are always the same. Of what a device does
beside the model, its block tables are kept, on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import argument_parser, machine, typed, write
from device.registry import get_device
from epd_serve.cache.block_pool import BlockPool
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import LanguageStream
from epd_serve.engine.engine import Engine, EngineEvent
from epd_serve.engine.sampling.sampler import PromptLogprobs
from epd_serve.engine.step import StepRunner
from epd_serve.engine.step_inputs import StepInputs
from epd_serve.engine.step_loop import StepLoop
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.sequence import Sequence as TokenSequence
from epd_serve.types import SamplingParams

BLOCK_SIZE, AXES, TOKEN = 16, 3, 5


class NoModel(StepRunner):
    """Keeps its tables and has logits without computing any."""

    def __init__(self, num_seqs: int, max_blocks: int) -> None:
        model: Any = None
        super().__init__(
            model,
            get_device("cpu"),
            torch.empty(0, 0, 0, BLOCK_SIZE),
            num_position_axes=AXES,
            max_num_seqs=num_seqs,
            max_model_len=max_blocks * BLOCK_SIZE,
        )
        self._logits = torch.zeros(num_seqs, 2 * TOKEN)
        self._logits[:, TOKEN] = 1

    def compute(
        self,
        inputs: StepInputs,
        on_layer: Callable[[int], None] | None = None,
        fed: Tensor | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> Tensor:
        self._tables.update(inputs.decodes, inputs.decode_context_lens)
        return self._logits[: len(inputs.rows)]


class Counter:
    """Takes the events of an engine whose prompts have no media."""

    num_tokens = 0

    def emit(self, events: list[EngineEvent]) -> None:
        self.num_tokens += len(events)

    def has(self, mm_hash: str) -> bool:
        return False

    def add_step(self, output: ScheduleOutput, seconds: float) -> None:
        """Steps are not recorded."""


def cell(num_seqs: int, context: int, num_steps: int) -> dict[str, Any]:
    """``num_steps`` steps in which all sequences decode."""
    length = context + 2 * num_steps + num_seqs * context // 8192 + 100
    max_blocks = -(-length // BLOCK_SIZE)
    counter: Any = Counter()
    pool = BlockPool(1 + num_seqs * (max_blocks + 1), BLOCK_SIZE)
    budget = Budget(max_num_tokens=8192, max_num_seqs=num_seqs)
    memory: Any = None  # no block is copied
    engine = Engine(pool, memory, budget, counter, eos_token_ids=frozenset())
    stream = LanguageStream(get_device("cpu"), DeviceBoard(None, 0, time.monotonic), limit_s=None)
    loop = StepLoop(engine, NoModel(num_seqs, max_blocks), counter, stream, counter, runs_ahead=True)
    for number in range(num_seqs):
        engine.submit(
            TokenSequence(
                request_id=str(number),
                prompt_ids=[TOKEN] * (context - number % BLOCK_SIZE),  # each takes its blocks in steps of its own
                sampling=SamplingParams(seed=0, temperature=0.0),
                max_tokens=length,
                positions=torch.zeros(AXES, context, dtype=torch.long),
            )
        )
    num_full = 0
    while num_full < num_steps:
        before, start_s = counter.num_tokens, time.thread_time()
        loop.step()
        if counter.num_tokens - before < num_seqs:
            num_full, total_s = 0, 0.0
        else:
            num_full, total_s = num_full + 1, total_s + time.thread_time() - start_s
    return {"sequences": num_seqs, "context": context, "cpu_ms_per_step": round(1e3 * total_s / num_steps, 3)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, "engine-thread.json")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    cells = [
        cell(num_seqs, context, options.steps) for context in options.contexts for num_seqs in options.sequences
    ]
    print(write(options.output, {"command": typed("engine_thread"), "machine": machine(), "cells": cells}))


if __name__ == "__main__":
    main()
