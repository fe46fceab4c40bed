"""Triton compiles a kernel for each combination of dtypes, divisibilities and ones among its arguments: all that
requests ask for must have been asked for by the steps before an instance is ready.

A process of its own asks Triton for these keys, on a chip of tests and without compiling: in this one the
kernels may be the interpreter's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from program import run_file

if importlib.util.find_spec("triton") is None:
    pytest.skip("not run: Triton is not installed", allow_module_level=True)

KERNELS = {
    "_draw_kernel",
    "_merge_kernel",
    "_rms_norm_kernel",
    "_rotate_kernel",
    "_split_kernel",
    "_survey_kernel",
    "_swiglu_kernel",
    "_write_kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["no graphs", "graphs"])
def test_requests_ask_for_no_kernel_that_the_warm_up_has_not_compiled(graphs: str, tmp_path: Path) -> None:
    """With graphs, kernels are compiled where these are captured, and the warm-up launches none of them."""
    path = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    keys = json.loads(run_file(__file__, str(path), graphs, timeout_s=300).splitlines()[-1])
    assert {name for name, _ in map(tuple, keys["warm up"])} == KERNELS
    forms = [name for name, _ in keys["requests"]]
    assert forms.count("_write_kernel") == 2, "one is for many tokens"
    assert [key for key in keys["requests"] if key not in keys["warm up"]] == []


def _main(path: Path, graphs: str) -> None:
    import triton
    from chip.accelerator import ChipDevice, ChipOps
    from chip.tensors import ChipTensor
    from engine_bench import BLOCK_SIZE, EngineBench
    from pictures import noise
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from device.base import EagerRunner
    from device.ops import triton_decode, triton_layers
    from device.ops.triton_ops import TritonOps
    from device.registry import get_device
    from epd_serve.engine.pace import StepTimer
    from epd_serve.sched.schedule import Budget

    assert isinstance(triton.language.cdiv, JITFunction), "unset TRITON_INTERPRET"
    backend = make_backend(GPUTarget("cuda", 90, 32))
    keys: set[tuple[str, str]] = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        raw = [one.raw if isinstance(one, ChipTensor) else one for one in args]
        _, specialization, chosen = binder(*raw, **options)
        keys.add((kernel.__name__, repr((specialization, sorted(chosen.items())))))

    class NotingOps(ChipOps):
        """Asks for Triton's kernels, and computes by others."""

        compiled_by = TritonOps.compiled_by

        def write_kv(self, *args: Any) -> None:
            triton_layers.write_kv(*args)
            super().write_kv(*args)

        def attend(self, query: Any, key: Any, value: Any, kv_layer: Any, plan: Any, scale: float) -> Any:
            meta = plan.meta
            if meta.num_decodes:
                table, lengths = meta.decode_block_table, meta.decode_context_lens
                rows = query[: meta.num_decodes]
                triton_decode.paged_decode(rows, kv_layer, table, lengths, scale, cores=132)
            return super().attend(query, key, value, kv_layer, plan, scale)

        def rms_norm(self, hidden: Any, weight: Any, epsilon: float) -> Any:
            triton_layers.rms_norm(hidden, None, weight, epsilon)
            return super().rms_norm(hidden, weight, epsilon)

        def add_rms_norm(self, hidden: Any, residual: Any, weight: Any, epsilon: float) -> Any:
            triton_layers.rms_norm(hidden, residual, weight, epsilon)
            total = hidden + residual
            return super().rms_norm(total, weight, epsilon), total

        def rotary(self, query: Any, key: Any, cos: Any, sin: Any) -> Any:
            for states in (query, key):
                triton_layers.rotate(states, cos, sin)
            rotated = super().rotary(query, key, cos, sin)
            return tuple(states.contiguous() for states in rotated)

        def swiglu(self, gate_up: Any) -> Any:
            triton_layers.swiglu(gate_up)
            return super().swiglu(gate_up)

        def draw(self, scores: Any, counters: Any, limits: Any) -> Any:
            TritonOps.draw(scores, counters, limits)
            return scores.argmax(-1)

    JITFunction.run = note
    device = get_device("chip:0")
    assert isinstance(device, ChipDevice)
    device.ops = NotingOps(device.chip)
    if graphs == "no graphs":
        vars(device)["graph_runner"] = EagerRunner
    budget = Budget(max_num_tokens=2200, max_num_seqs=8)
    bench = EngineBench(path, budget, device=device, num_blocks=700, runs_ahead=True, starts=False)
    device.activate()
    runner = bench.loop._runner
    timer = StepTimer(
        runner, num_blocks=700, block_size=BLOCK_SIZE, num_position_axes=bench.family.num_position_axes
    )
    timer.warm_up(device.ops.compiled_by, budget.max_num_tokens, 600)
    images = [noise(1), noise(2, (60, 140))]
    bench.encode(images)  # a tower of an instance encodes as it is loaded
    device.synchronize()
    ready = sorted(keys)
    keys.clear()
    prompts = [("Repeat: " + "banana " * 480, [])] * 4
    prompts += [("Say apple", []), ("What is this?", images[:1]), ("What is in the picture?", images)]
    prompts += [("Repeat: " + "apple " * count, []) for count in (1, 15, 64, 250)]
    sampled = [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "logprobs": 2},
        {"repetition_penalty": 1.2, "min_p": 0.1, "temperature": 0.5},
        {"logit_bias": {5: 2.0}},
    ]
    for number, (text, media) in enumerate(prompts):
        sampling = sampled[number % len(sampled)]
        sequence = bench.sequence(f"r{number}", text, media, max_tokens=3 + number, **sampling)
        bench.engine.submit(sequence)
    bench.loop.start()  # prompts are together in a step
    bench.collect(len(prompts))
    bench.close()
    device.synchronize()
    print(json.dumps({"warm up": ready, "requests": sorted(keys)}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
