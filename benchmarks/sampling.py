"""The cost of a decode step besides the model, for each way to choose tokens.

    python -m benchmarks.sampling [--batch 32] [--steps 12] [--model 0.5B]

One thread, bfloat16, random weights. Their distributions are flat, the hard case for top-p.
Times are processor time of the engine's thread: inside the model's call, and from its end to the next one's begin
(sampling, bookkeeping, scheduling, packing). Medians over the steps.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks import engine_native
from benchmarks.common import RESULTS, argument_parser, write
from benchmarks.engine_native import NativeEngine, random_prompts
from benchmarks.models import make_shape
from device.host import processor_name
from device.registry import get_device
from epd_serve.engine.sampling.sampler import PromptLogprobs
from epd_serve.engine.step import StepExecutor
from epd_serve.engine.step_inputs import StepInputs
from epd_serve.types import SamplingParams

RESULT = RESULTS / "sampling-cpu.json"
PROMPT = 64
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.5": {"top_p": 0.5},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "penalties, top-p 0.9": {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}


class StampingExecutor(StepExecutor):
    """Notes the engine thread's processor time around each step."""

    stamps: list[tuple[float, float]]

    def compute(
        self,
        inputs: StepInputs,
        on_layer: Callable[[int], None] | None = None,
        fed: Tensor | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> Tensor:
        start = time.thread_time()
        logits = super().compute(inputs, on_layer, fed, logprobs)
        self.stamps.append((start, time.thread_time()))
        return logits


def measure(
    engine: NativeEngine, prompts: list[list[int]], steps: int, params: dict[str, Any]
) -> dict[str, float]:
    """Milliseconds of a step inside and outside the model, and the latter's share."""
    stamps: list[tuple[float, float]] = []
    engine.executor.stamps = stamps  # type: ignore[attr-defined]
    engine.generate(prompts, steps + 2, SamplingParams(seed=0, ignore_eos=True, **params))
    decodes = stamps[-steps:]
    inside = statistics.median(end - start for start, end in decodes)
    outside = statistics.median(later[0] - one[1] for one, later in pairwise(decodes))
    return {
        "inside_ms": round(1e3 * inside, 2),
        "outside_ms": round(1e3 * outside, 2),
        "outside_share": round(outside / (inside + outside), 4),
    }


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", default="0.5B")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "epd-serve-benchmark-models")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine_native.TimedExecutor = StampingExecutor  # type: ignore[assignment,misc]
    path = make_shape(options.model, options.cache / options.model)
    room = options.batch * (PROMPT + options.steps + 32)
    engine = NativeEngine(path, torch.bfloat16, get_device("cpu"), max_tokens=room, graph_sizes=[])
    vocabulary = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    prompts = random_prompts(options.batch, PROMPT, vocabulary)
    found: dict[str, dict[str, float]] = {}
    for name, params in KINDS.items():
        found[name] = measure(engine, prompts, options.steps, params)
        print(f"{name:24} {found[name]}", flush=True)
    engine.close()
    content = {
        "command": f"python -m benchmarks.sampling --batch {options.batch} --steps {options.steps} "
        f"--model {options.model}",
        "processor": processor_name(),
        "torch": torch.__version__,
        "kinds": found,
    }
    write(options.output, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
