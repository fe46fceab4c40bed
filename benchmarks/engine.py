"""The native engine against transformers' ``generate`` and vLLM on this CPU, and against what the CPU can do.

    python -m benchmarks.engine [--vllm-python /path/to/venv/bin/python] [--threads 1] [--rounds 3]

Each engine is one process with the same model, threads and heap settings; for each case they take turns, and the
table has medians over the rounds. "CPU" is processor time of all threads, which other programs disturb less than
the clock. Decode is (prompt and 33 tokens) less (prompt and one token).

The roofline is measured in the same run: a bf16 matrix product, and a read of 512 MiB. A stage can be no faster
than its multiplications at the first rate, or its weights at the second. vLLM needs an environment of its own in
which ``vllm serve`` runs; without ``--vllm-python`` its column is missing, and the output says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from transformers import AutoConfig

from benchmarks.common import RESULTS, ROOT, JsonProcess, argument_parser, write
from benchmarks.models import BUILT_IN, make_shape
from device.host import processor_name
from epd_serve.demo import weights_dir
from epd_serve.launch.processes.forking import HEAP_TUNABLES

BATCHES = (1, 8, 32)
PROMPT, TOKENS = 128, 32


class Worker:
    """An engine's process. ``failure`` says why it runs no more cases."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name = name
        self.failure: str | None = None
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = os.environ | {
            "GLIBC_TUNABLES": HEAP_TUNABLES,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._process = JsonProcess(command, environment, self._log)
        self._seen(self._process.answer())

    def ask(self, **case: Any) -> dict[str, Any] | None:
        """Times of a case; None where the engine has failed."""
        return None if self.failure is not None else self._seen(self._process.ask(case))

    def close(self) -> None:
        self._process.close()
        self._log.close()

    def _seen(self, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        if answer is None:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            self.failure = lines[-1][:200] if lines else "it ended without a word"
            print(f"{self.name} takes no part: {self.failure}", flush=True)
        return answer


def roofline(threads: int) -> dict[str, float]:
    """Peak rates of this CPU with ``threads`` threads: multiplications of a bf16 product, bytes of a read."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    numbers = torch.ones(1 << 26, dtype=torch.int64)
    left, right = torch.randn(2, 1536, 1536).bfloat16().unbind(0)
    best = {"read_gb_s": 0.0, "gemm_gflop_s": 0.0}
    for _ in range(6):
        start = clock()
        numbers.sum()
        best["read_gb_s"] = max(best["read_gb_s"], numbers.numel() * 8 / (clock() - start) / 1e9)
        start = clock()
        left @ right
        best["gemm_gflop_s"] = max(best["gemm_gflop_s"], 2 * 1536**3 / (clock() - start) / 1e9)
    return best


def floors(config: Any, batch: int, limits: dict[str, float]) -> dict[str, float]:
    """Seconds that prefill and one decode step take at least: weights alone, attention left out."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = head_dim * (2 * text.num_attention_heads + 2 * text.num_key_value_heads)
    layers = text.num_hidden_layers * text.hidden_size * (attention + 3 * text.intermediate_size)
    head = text.hidden_size * text.vocab_size
    read = 2 * (layers + head) / limits["read_gb_s"] / 1e9
    flop_s = limits["gemm_gflop_s"] * 1e9
    return {
        "prefill": max(2 * batch * (PROMPT * layers + head) / flop_s, read),
        "decode": max(2 * batch * (layers + head) / flop_s, read),
    }


def measure(name: str, path: Path, workers: list[Worker], rounds: int, threads: int) -> dict[str, Any]:
    """Rows of one model: for each stage and batch, tokens a second of each engine."""
    config = AutoConfig.from_pretrained(path)
    vision = config.vision_config
    side = 12 if name == BUILT_IN else 32
    image = {"grid": [1, side, side], "width": 6 * vision.patch_size**2}
    seconds: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    limits: list[dict[str, float]] = []
    for worker in workers:  # the first calls of a size compile, allocate and fault
        worker.ask(stage="generate", batch=BATCHES[-1], prompt=PROMPT, tokens=2)
        worker.ask(stage="encode", batch=1, **image)
    for _ in range(rounds):
        limits.append(_roofline_apart(threads))
        for batch in BATCHES:
            for worker in workers:
                case = {"stage": "generate", "batch": batch, "prompt": PROMPT}
                first, all_ = worker.ask(**case, tokens=1), worker.ask(**case, tokens=TOKENS + 1)
                if first is None or all_ is None:
                    continue
                both = {key: all_[key] - first[key] for key in first}
                seconds.setdefault(("prefill", batch, worker.name), []).append(first)
                seconds.setdefault(("decode", batch, worker.name), []).append(both)
        for batch in (1, 4):
            for worker in workers:
                encoded = worker.ask(stage="encode", batch=batch, **image)
                if encoded is not None:
                    seconds.setdefault(("encode", batch, worker.name), []).append(encoded)
    limit = {key: statistics.median(one[key] for one in limits) for key in limits[0]}
    rows: list[dict[str, Any]] = []
    for (stage, batch, engine), times in seconds.items():
        cpu, wall = (statistics.median(one[key] for one in times) for key in ("cpu_s", "wall_s"))
        tokens = {"prefill": batch * PROMPT, "decode": batch * TOKENS}.get(stage) or times[0]["tokens"]
        row = {"stage": stage, "batch": batch, "engine": engine}
        row |= {"tokens_cpu_s": round(tokens / cpu, 1), "tokens_wall_s": round(tokens / wall, 1)}
        if stage != "encode":
            steps = TOKENS if stage == "decode" else 1
            floor = floors(config, batch, limit)[stage] * steps
            row["of_roofline"] = round(floor / (cpu if threads == 1 else wall), 3)
        if stage == "decode" and "model_cpu_s" in times[0]:
            row["outside_model"] = round(
                statistics.median(1 - one["model_cpu_s"] / one["cpu_s"] for one in times), 3
            )
        rows.append(row)
    return {"limits": limit, "rows": rows, "missing": {w.name: w.failure for w in workers if w.failure}}


def _roofline_apart(threads: int) -> dict[str, float]:
    """In a process with the workers' heap: pages of the default size read more slowly."""
    code = f"import json; from benchmarks.engine import roofline; print(json.dumps(roofline({threads})))"
    environment = os.environ | {"GLIBC_TUNABLES": HEAP_TUNABLES, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


def table(results: dict[str, Any], engines: Sequence[str]) -> str:
    """Markdown: a row for each model, stage and batch, a column for each engine."""
    lines = ["| model | stage | batch | " + " | ".join(engines) + " | native of roofline |"]
    lines.append("|---" * (len(engines) + 4) + "|")
    for model, result in results.items():
        cells: dict[tuple[str, int], dict[str, Any]] = {}
        for row in result["rows"]:
            cells.setdefault((row["stage"], row["batch"]), {})[row["engine"]] = row
        for (stage, batch), of_engine in cells.items():
            rates = [f"{of_engine[e]['tokens_cpu_s']:,.0f}" if e in of_engine else "–" for e in engines]
            share = of_engine.get("native", {}).get("of_roofline")
            end = "" if share is None else f"{share:.0%}"
            lines.append(f"| {model} | {stage} | {batch} | {' | '.join(rates)} | {end} |")
    return "\n".join(lines)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.5B", BUILT_IN])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", help="the Python of an environment in which vLLM runs")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "epd-serve-benchmark-models")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    commands = {
        "native": [sys.executable, "-m", "benchmarks.engine_native"],
        "transformers": [sys.executable, "-m", "benchmarks.engine_native", "--transformers"],
    }
    if options.vllm_python:
        commands["vllm"] = [options.vllm_python, str(ROOT / "benchmarks" / "engine_vllm.py")]
    else:
        print("vLLM takes no part: name the Python of its environment with --vllm-python")
    results: dict[str, Any] = {}
    for name in options.models:
        path = weights_dir() if name == BUILT_IN else make_shape(name, options.cache / name)
        vocabulary = AutoConfig.from_pretrained(path).get_text_config().vocab_size
        arguments = [str(path), "--threads", str(options.threads), "--vocabulary", str(vocabulary)]
        workers = [Worker(engine, command + arguments, options.threads) for engine, command in commands.items()]
        results[name] = measure(name, path, workers, options.rounds, options.threads)
        for worker in workers:
            worker.close()
        print(json.dumps({name: results[name]["limits"]}))
    text = table(results, list(commands))
    print(f"\ntokens per processor second, {options.threads} thread(s), {processor_name()}\n\n{text}")
    output: Path = options.output or RESULTS / "engine-cpu.json"
    content = {
        "command": f"python -m benchmarks.engine --threads {options.threads} --rounds {options.rounds} "
        f"--models {' '.join(options.models)}{' --vllm-python PYTHON' if options.vllm_python else ''}",
        "processor": processor_name(),
        "threads": options.threads,
        "torch": torch.__version__,
        "prompt": PROMPT,
        "models": results,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write(output, content)
    output.with_suffix(".md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
