"""Everything that needs a GPU, in one call: served models first, then the engine, transfers, kernels and tests.

    python -m benchmarks.gpu --output gpu.json                     # cuda:0; 9 minutes at most
    python -m benchmarks.gpu --output gpu.json --only serve        # one part
    python -m benchmarks.gpu --output gpu.json --device cpu --tiny # small sizes, to check that each part runs

It needs torch, triton, transformers, pytest, hypothesis, pillow and the wheels in ``WHEELS``; no model or network.

* ``serve``: Qwen2.5-VL-7B's shape in bfloat16 as ``EPD`` and ``(E-P-D)``, Llama 3 8B's as ``PD``, on the one
  device: TTFT, gaps between tokens and tokens a second at 1, 64 and 256 streams, prompts of 1000 tokens and
  answers of 128, prompts of 100 and answers of 256, then pictures of 896 x 896; the median time of each stage,
  from traces, and the phases of the start, from logs;
* ``peer``: the same language model and load by transformers' own continuous batching, ``generate_batch``;
* ``engine``: encode, prefill, decode, mixed steps and two streams, with and without graphs;
* ``handoff``: the KV of a prompt and the feature of a picture between two processes, by each transport;
* ``colocation``: time per token and encodes a second side by side, by what separates the two;
* ``attention``: paged decode, prompts, towers, the cache's write, norms, rotation and SwiGLU beside torch's calls;
* ``sampling``: draws from 152,000 tokens;
* ``startup``: imports, the opening of the device, ``epd-serve up`` until it is ready;
* ``tests``: pytest over tests/device, so that every operator is compared with the oracle on this device.

Each part runs in processes of its own, which end with its time limit. The file has all rows that a part measured
until then. Random weights lie in /dev/shm meanwhile. The exit status is 1 where a part did not end by itself, or
tests failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: What an image with torch and transformers may lack.
WHEELS = (
    *(
        "aiohttp",
        "blake3",
        "fastapi",
        "httptools",
        "llguidance",
        "msgspec",
        "prometheus_client",
        "psutil",
        "pybase64",
        "pydantic",
    ),
    *("rich", "ruamel.yaml", "typer", "uvicorn", "uvloop", "yarl"),
)
_OTHERS = ("torch", "torchvision", "triton", "transformers", "pytest", "hypothesis", "numpy", "PIL")
#: Plugins of the full test environment may be missing, and libraries of a vendor warn.
PYTEST = (
    *("--noconftest", "-q", "--tb=short", "-W", "default", "-p", "no:cacheprovider"),
    *("-o", "addopts=--import-mode=importlib"),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a part is asked for, and where its rows go."""

    device: str
    tiny: bool
    weights: Path
    file: Path

    def keep(self, name: str, row: Any) -> None:
        """Add a row to the part's file, which is whole at any time."""
        from benchmarks.common import write

        rows = json.loads(self.file.read_text()) if self.file.exists() else {}
        rows[name] = row
        write(self.file, rows)
        print(f"   {name}: {json.dumps(row)[:300]}", flush=True)

    @contextlib.contextmanager
    def keeping(self, name: str) -> Iterator[None]:
        """Go on behind a row that cannot be had, with the reason in its place."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a row is not worth those behind it
            self.keep(name, f"failed: {type(error).__name__}: {error}"[:2000])

    def model(self, shape: str) -> Path:
        """The directory of a shape's random weights, made once for all parts."""
        from benchmarks.models import make_shape

        return make_shape(shape, self.weights / shape)

    def open(self) -> Any:
        from device.registry import get_device

        device = get_device(self.device)
        device.activate()
        return device


# ---------------------------------------------------------------------- served models


@dataclass(frozen=True, kw_only=True)
class Load:
    """Closed-loop streams of one size; the chat template adds 8 tokens to the text."""

    streams: int
    text_tokens: int = 1000
    output_tokens: int = 128
    side: int | None = None
    waves: int = 2

    @property
    def name(self) -> str:
        picture = f", pictures of {self.side}" if self.side else ""
        return f"{self.streams} streams of {self.text_tokens} + {self.output_tokens}{picture}"

    @property
    def workload(self) -> str:
        pictures = "image_share=0" if self.side is None else f"image_share=1,image_size={self.side}x{self.side}"
        return f"synthetic,text_tokens={self.text_tokens},output_tokens={self.output_tokens},{pictures}"


_FEW, _MANY, _MOST = Load(streams=1), Load(streams=64), Load(streams=256, waves=1)
_DECODES = Load(streams=256, text_tokens=100, output_tokens=256, waves=1)
_LOADS = [_FEW, _MANY, _MOST, _DECODES, replace(_FEW, side=896), replace(_MANY, side=896)]
_TINY_LOADS = [Load(streams=2, text_tokens=20, output_tokens=4, side=side) for side in (None, 56)]
#: Shape, topology on the one device, loads.
_SERVED = [
    ("Qwen2.5-VL-7B", "EPD", _LOADS),
    ("Qwen2.5-VL-7B", "(E-P-D)", [_FEW, _MANY]),
    ("Llama-3-8B", "PD", [_MANY]),
]
#: A line of an instance's log.
_PHASE = (
    r"^(\S+ \S+) (\S+) INFO (modules imported|tower loaded|language model loaded|.* allocated|engine warmed up)$"
)
_TINY_SERVED = [("tiny", "(E-P-D)", _TINY_LOADS), ("tiny-llama", "PD", _TINY_LOADS[:1])]


def serve(run: Run) -> None:
    for shape, topology, loads in _TINY_SERVED if run.tiny else _SERVED:
        name = f"{shape} {topology}"
        with run.keeping(name), _serving(run, topology, run.model(shape)) as served:
            run.keep(f"{name}: ready, s", served.start)
            for number, load in enumerate(loads):  # other texts in each, so that no prefix is cached
                with run.keeping(f"{name}: {load.name}"):
                    row = _bench(served.url, load, number, run.weights)
                    run.keep(f"{name}: {load.name}", row | {"stages_ms": served.stages_ms()})


@dataclass(frozen=True, kw_only=True)
class Served:
    """A deployment that answers.

    Attributes:
        start: seconds from its start until it was ready, and until each phase of each instance was done.
        trace: directory of its traces.
    """

    url: str
    start: dict[str, Any]
    trace: Path
    _seen: set[str] = field(default_factory=set)

    def stages_ms(self) -> dict[str, float]:
        """The median time in each stage of the requests since the last call."""
        from epd_serve.telemetry.breakdown import read_traces, summary

        requests = [one for one in read_traces(self.trace).requests if one.request_id not in self._seen]
        self._seen.update(one.request_id for one in requests)
        return {stage: round(row["p50_ms"], 2) for stage, row in summary(requests)["rows"].items()}


@contextlib.contextmanager
def _serving(run: Run, topology: str, model: Path | None) -> Iterator[Served]:
    from epd_serve.bench.deployed import Candidate, deployed
    from epd_serve.config import load_config

    folder = Path(tempfile.mkdtemp(dir=run.weights))
    file, log, trace = (folder / name for name in ("deployment.yaml", "deployment.log", "trace"))
    served = {} if model is None else {"model": str(model), "dtype": "bfloat16"}
    # JSON is YAML
    file.write_text(json.dumps({"topology": topology, "devices": [run.device], "trace": str(trace), **served}))
    candidate = Candidate(file=file, label=topology, config=load_config(file))
    began = time.time()
    with deployed(candidate, log) as url:
        start = {"ready": time.time() - began, **_phases(log.read_text(), began)}
        yield Served(url=url, start=start, trace=trace)


def _phases(output: str, began: float) -> dict[str, dict[str, float]]:
    """The seconds after which each instance logged the end of a phase of its start."""
    found = re.search(r"^Logs: (.+)$", output, re.MULTILINE)
    assert found is not None, output
    phases: dict[str, dict[str, float]] = {}
    for log in Path(found[1]).glob("*.log"):
        for day, name, phase in re.findall(_PHASE, log.read_text(), re.MULTILINE):
            ended = datetime.strptime(day, "%Y-%m-%d %H:%M:%S,%f").timestamp()
            phases.setdefault(name, {})[phase] = round(ended - began, 2)
    return phases


def _bench(url: str, load: Load, seed: int, folder: Path) -> dict[str, Any]:
    count = max(4, load.waves * load.streams)
    command = [sys.executable, "-m", "epd_serve.cli", "bench", "--base-url", url, "--workload", load.workload]
    command += ["--arrivals", f"closed:{load.streams}", "--num-requests", str(count), "--warmups", "1"]
    command += ["--seed", str(seed)]
    command += ["--json", "--no-report", "--work-dir", str(folder / "bench")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    try:
        (result,) = json.loads(done.stdout)
        total = result["summary"]["total"]
    except (ValueError, LookupError):
        raise RuntimeError(f"bench: {done.stdout[-300:]} {done.stderr[-700:]}") from None
    figures = {
        f"{name}_ms": {part: round(1000 * figure[part], 2) for part in ("median", "p99")}
        for name, figure in total["figures"].items()
        if name in ("ttft", "tpot", "itl")
    }
    answered: dict[str, Any] = {"input_tokens": total["figures"]["input_tokens"]["median"]}
    answered |= {"succeeded": total["num_succeeded"], "requests": total["num_requests"]}
    if total["num_succeeded"] < total["num_requests"]:
        answered["output"] = done.stderr[-2000:]
    elif count == 4:  # a median hides a wait for what is used for the first time
        records = map(json.loads, Path(result["directory"], "records.jsonl").read_text().splitlines())
        answered["each_ttft_ms"] = [round(1000 * (one["first_token_s"] - one["sent_s"]), 2) for one in records]
    return answered | {"output_tokens_s": round(total["output_token_throughput"], 1)} | figures


# ---------------------------------------------------------------------- one process


def peer(run: Run) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from benchmarks.models import language_model

    model = language_model("tiny-llama" if run.tiny else "Qwen2.5-VL-7B", run.device)
    loads = _TINY_LOADS[:1] if run.tiny else [_FEW, _MANY]
    numbers = random.Random(0)
    for load in loads:
        count = load.waves * load.streams
        length = load.text_tokens + 8
        prompts = [[numbers.randrange(3, 1000) for _ in range(length)] for _ in range(count)]
        generation = GenerationConfig(max_new_tokens=load.output_tokens, do_sample=False, eos_token_id=-1)
        batching = ContinuousBatchingConfig(max_requests_per_batch=load.streams)
        with run.keeping(load.name):
            # the first call compiles and captures
            answer = partial(model.generate_batch, generation_config=generation, persistent_manager=True)
            answer(prompts[: load.streams], continuous_batching_config=batching)
            began = time.monotonic()
            answers = answer(prompts, continuous_batching_config=batching)
            seconds = time.monotonic() - began
            model.destroy_cached_continuous_batching_manager()
            tokens = sum(len(one.generated_tokens) for one in answers.values())
            run.keep(load.name, {"requests": count, "tokens": tokens, "output_tokens_s": tokens / seconds})


def engine(run: Run) -> None:
    from benchmarks.engine_gpu import ENGINE_SHAPES, measure_shape
    from benchmarks.gpu_timing import ceilings

    device = run.open()
    limits = ceilings(device, tiny=run.tiny)
    run.keep("ceilings", limits)
    for shape in ("tiny",) if run.tiny else ENGINE_SHAPES:
        for name, row in measure_shape(run.model(shape), device, limits, tiny=run.tiny):
            run.keep(f"{shape}: {name}", row)


def handoff(run: Run) -> None:
    from benchmarks import handoff as measured
    from epd_serve.protocol.wire import KVLayout

    small = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32", model="m")
    sizes: dict[str, Any] = {"layout": small, "num_tokens": 64, "repeats": 1} if run.tiny else {}
    for name, row in measured.measure_kv(run.device, **sizes):
        run.keep(f"KV, {name}", row)
    sizes = {"shape": (16, 16), "repeats": 1} if run.tiny else {}
    for name, row in measured.measure_feature(run.device, **sizes):
        run.keep(f"feature, {name}", row)


def colocation(run: Run) -> None:
    from benchmarks import colocation as measured
    from benchmarks.gpu_timing import ceilings

    device = run.open()
    limits = ceilings(device, tiny=run.tiny)
    path = run.model("tiny" if run.tiny else "Qwen2.5-VL-7B")
    for name, row in measured.measure(device, path, limits, tiny=run.tiny):
        run.keep(name, row)


def attention(run: Run) -> None:
    from benchmarks.gpu_kernels import measure_attention
    from benchmarks.gpu_timing import ceilings

    device = run.open()
    limits = ceilings(device, tiny=run.tiny)
    run.keep("ceilings", limits)
    for name, row in measure_attention(device, limits, tiny=run.tiny):
        run.keep(name, row)


def sampling(run: Run) -> None:
    from benchmarks.gpu_kernels import measure_sampling

    for name, row in measure_sampling(run.open(), tiny=run.tiny):
        run.keep(name, row)


def startup(run: Run) -> None:
    for module in ("epd_serve.instance.loading.checkpoint", "proxy.main"):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", f"import {module}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        found = re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", done.stderr, re.MULTILINE)
        times: Counter[str] = Counter()
        for own_us, name in found:
            times[".".join(name.split(".")[:2])] += int(own_us)
        slowest = {name: own_us / 1e6 for name, own_us in times.most_common(12)}
        run.keep(f"import {module}", {"s": times.total() / 1e6, "slowest_s": slowest})
    opening = (
        "import time; from device.registry import get_device; began = time.perf_counter(); "
        f"device = get_device({run.device!r}); device.activate(); device.synchronize(); "
        "print(time.perf_counter() - began)"
    )
    done = subprocess.run([sys.executable, "-c", opening], capture_output=True, text=True, cwd=ROOT, check=True)
    run.keep("device opened, s", float(done.stdout.split()[-1]))
    topology = "EPD" if run.tiny else "(E-P-D)"
    with run.keeping(topology), _serving(run, topology, None) as served:
        run.keep(f"demo model as {topology}: ready, s", served.start)


def tests(run: Run) -> None:
    """pytest over tests/device; failures are kept as they come."""
    chosen = ["tests/device/test_registry.py"] if run.tiny else ["tests/device"]
    command = [sys.executable, "-m", "pytest", *chosen, *PYTEST, "-v", "-m", "not slow"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    output: list[str] = []
    failed: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if (match := re.match(r"(\S+::.*?) (FAILED|ERROR)", line)) is not None:
                failed.append(match[1])
                run.keep("failed", failed)
    run.keep("summary", output[-1].strip(" =\n") if output else "")
    if process.returncode:
        run.keep("output", "".join(output)[-8000:])
        raise SystemExit(1)


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True, kw_only=True)
class Part:
    measure: Callable[[Run], None]
    limit_s: float


#: In the order of their value: a machine may be taken away before the last one.
PARTS = {
    "serve": Part(measure=serve, limit_s=220),
    "peer": Part(measure=peer, limit_s=40),
    "engine": Part(measure=engine, limit_s=50),
    "handoff": Part(measure=handoff, limit_s=40),
    "startup": Part(measure=startup, limit_s=60),
    "attention": Part(measure=attention, limit_s=35),
    "sampling": Part(measure=sampling, limit_s=15),
    "colocation": Part(measure=colocation, limit_s=40),
    "tests": Part(measure=tests, limit_s=40),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file, written after each part")
    parser.add_argument("--device", default="cuda:0", help="the device; cpu checks that it runs")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all by default")
    parser.add_argument("--limit", type=float, default=1.0, help="time limits are multiplied by this")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if lacking := [name for name in (*_OTHERS, *WHEELS) if not _is_there(name)]:
        print(
            f"benchmarks.gpu lacks {', '.join(lacking)}. Where there is a network: pip download -d wheels "
            f"{' '.join(WHEELS)}; here: pip install --no-index --find-links wheels {' '.join(WHEELS)}",
            file=sys.stderr,
        )
        return 2
    if arguments.part:
        run = Run(device=arguments.device, tiny=arguments.tiny, weights=arguments.weights, file=arguments.output)
        PARTS[arguments.part].measure(run)
        return 0
    return measure(arguments)


def measure(arguments: argparse.Namespace) -> int:
    """Run the chosen parts; the output file is written behind each. Returns the exit status."""
    from benchmarks.common import write

    # In a process that ends: this one keeps no memory of the device.
    asking = f"from device.registry import get_device; print(get_device({arguments.device!r}).description)"
    asked = subprocess.run([sys.executable, "-c", asking], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        print(f"benchmarks.gpu: {(asked.stderr.splitlines() or ['no answer'])[-1]}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.gpu {' '.join(sys.argv[1:])}",
        "device": asked.stdout.strip(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")},
        "parts": {},
    }
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() and not arguments.tiny else None) as folder:
        for name in (part for part in PARTS if part in arguments.only):
            print(f"== {name}", flush=True)
            result["parts"][name] = _measure_part(name, arguments, Path(folder))
            write(arguments.output, result)
    ends = {name: part["ended"] for name, part in result["parts"].items()}
    print(f"{ends}; written to {arguments.output}")
    return int(any(end != "done" for end in ends.values()))


def _measure_part(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a part in a process group of its own, which ends with the part."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", arguments.device]
    command += ["--output", str(file), "--weights", str(folder), *(["--tiny"] if arguments.tiny else [])]
    began, limit_s = time.monotonic(), PARTS[name].limit_s * arguments.limit
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(limit_s)
        ended = "done" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        ended = f"time limit of {limit_s:.0f} s"
    finally:
        # Also what a part has left behind: it would hold memory that the next part measures.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows = json.loads(file.read_text()) if file.exists() else {}
    return {"seconds": round(time.monotonic() - began, 1), "ended": ended, "rows": rows}


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


if __name__ == "__main__":
    sys.exit(main())
