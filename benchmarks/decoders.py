"""The generic decoder beside the fused one: steps of one model in bfloat16 on one thread, in turns.

    python -m benchmarks.decoders [--shape 0.5B] [--rounds 7]

Seconds are CPU time of the process, which others on the machine do not lengthen; of each step the median of all
rounds is taken, and of the pairs the median ratio.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import argument_parser, machine, typed, write
from benchmarks.models import SHAPES, make_shape
from device.registry import get_device
from epd_serve.models.family import DecoderKind
from epd_serve.models.loader import load_family
from epd_serve.profiling.device_profile import GridOptions, step_timer
from epd_serve.sched.step_sizes import StepShape

#: The generic decoder takes at most so many times the fused one's.
GOAL = 1.3
STEPS = {
    "prompt of 256": StepShape(chunks=((0, 256),)),
    "prompt of 1024": StepShape(chunks=((0, 1024),)),
    "1 decode after 512": StepShape(num_decodes=1, context=512),
    "8 decodes after 512": StepShape(num_decodes=8, context=512),
    "32 decodes after 256": StepShape(num_decodes=32, context=256),
}
_DECODERS: tuple[DecoderKind, ...] = ("fused", "generic")


def measure(path: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of each step by each decoder, and of their ratios."""
    torch.set_num_threads(1)
    device, family = get_device("cpu"), load_family(path)
    options = GridOptions(model=path, model_name="", device="cpu", dtype=torch.bfloat16, threads=1)
    seconds: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack, torch.inference_mode():
        timers = {
            decoder: stack.enter_context(step_timer(options, device, family, time.process_time, decoder))[0]
            for decoder in _DECODERS
        }
        calls = {(name, one): timers[one].step(step) for name, step in STEPS.items() for one in _DECODERS}
        for number in range(rounds + 1):  # the first one warms up
            for key, call in calls.items():
                began_s = time.process_time()
                call()
                if number:
                    seconds.setdefault(key, []).append(time.process_time() - began_s)
    found = {}
    for name in STEPS:
        fused, generic = (seconds[name, one] for one in _DECODERS)
        ratios = [there / here for here, there in zip(fused, generic, strict=True)]
        found[name] = {
            "fused_s": round(statistics.median(fused), 4),
            "generic_s": round(statistics.median(generic), 4),
            "ratio": round(statistics.median(ratios), 3),
        }
    return found


def main() -> int:
    parser = argument_parser(__doc__, "decoders-cpu.json")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(make_shape(arguments.shape, Path(folder)), arguments.rounds)
    result: dict[str, Any] = {"command": typed("decoders"), "machine": machine(), "goal": GOAL, "steps": steps}
    print(write(arguments.output, result))
    return int(max(one["ratio"] for one in steps.values()) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
