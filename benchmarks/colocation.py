"""A tower beside decodes on one device: time per token, and pictures a second, by what separates the two.

    python -m benchmarks.colocation                         # emulated devices, by a virtual clock: exact, no GPU
    python -m benchmarks.gpu --only colocation              # on an NVIDIA GPU

* ``none``: two streams of one process, equally urgent;
* ``priority``: decodes first, as in ``EP``, ``EPD`` and ``ED``;
* ``tower_share``: the tower besides keeps to a part of the multiprocessors (a green context);
* ``processes``: two processes, as in ``(E-D)`` without shares, which take turns;
* ``mps``: two processes with shares by MPS, which this script starts and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.common import RESULTS, write
from benchmarks.engine_gpu import _Model
from benchmarks.gpu_timing import empty_cache
from device import mps
from device.base import Device, Stream
from device.emulated.timed import TimedDevice
from device.registry import get_device
from epd_serve.cost.roofline import emulated_profile
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import LANGUAGE_PRIORITY, LanguageStream, TowerStream
from epd_serve.sched.step_cost import StepWork

#: Of the tower, where it has one, and of the decodes beside it under MPS.
TOWER_SHARE = 0.5
#: By mode: priority and share of the tower's stream. Graphs of decodes keep the priority of their capture.
MODES: dict[str, tuple[int, float | None]] = {
    "none": (LANGUAGE_PRIORITY, None),
    "priority": (0, None),
    "tower_share": (0, TOWER_SHARE),
}
_SECONDS, _TINY_SECONDS, _LOAD_S = 5.0, 0.2, 600.0


# ---------------------------------------------------------------------- emulated


class VirtualClock:
    """Seconds that pass where somebody sleeps."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def emulate(kind: str, mode: str, *, batch: int = 128, context: int = 1024, side: int = 896) -> dict[str, float]:
    """200 steps of decodes beside pictures of ``side`` x ``side`` without end, on an emulated device.

    The streams are those of an instance; ``none`` gives the tower the language model's priority.
    """
    clock, profile = VirtualClock(), emulated_profile("qwen2.5-vl-7b", kind)
    device = TimedDevice(kind, 0, clock=clock, sleep=clock.sleep)
    board = DeviceBoard(None, 0, clock)
    language = LanguageStream(device, board, limit_s=None, clock=clock)
    priority, share = MODES.get(mode, (0, None))
    tower = TowerStream(device, board, priority=priority, share=share, clock=clock)
    work = StepWork.of([context] * batch, [])
    step_s, demand = profile.step_demand(
        work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs
    )
    with language.stream:
        steps = [device.current_stream().launch(step_s, demand=demand) for _ in range(200)]
    encodes = []
    if mode != "alone":
        encode_s, tower_demand = profile.encode_demand([side**2])
        with tower.encoding(side**2):
            stream = device.current_stream()
            encodes = [stream.launch(encode_s, demand=tower_demand) for _ in range(1000)]
    steps[-1].wait()
    end_s = steps[-1].end_s
    return {
        "tpot_ms": 1e3 * (end_s - steps[0].begin_s) / len(steps),
        "encodes_s": sum(one.query() and one.end_s <= end_s for one in encodes) / end_s,
    }


# ---------------------------------------------------------------------- on a device


def measure(
    device: Device, path: Path, limits: Mapping[str, float], *, tiny: bool
) -> Iterator[tuple[str, dict[str, float] | str]]:
    """Yield the figures of each mode for a checkpoint, or the reason why it cannot be had here."""
    model = _Model(path, device, limits, tiny=tiny)
    with device.stream(LANGUAGE_PRIORITY):
        model.load()
    for mode in ("alone", *MODES):
        try:
            yield mode, _in_one_process(model, device, mode, tiny=tiny)
        except (ValueError, RuntimeError) as error:
            yield mode, f"not run: {error}"
    del model
    empty_cache(device)
    yield "processes", _in_two_processes(path, device.name, dict(os.environ), tiny=tiny)
    with tempfile.TemporaryDirectory() as folder:
        yield "mps", _under_mps(path, device, Path(folder, "mps"), tiny=tiny)


def _in_one_process(model: _Model, device: Device, mode: str, *, tiny: bool) -> dict[str, float]:
    streams = {"decode": device.stream(LANGUAGE_PRIORITY), "tower": device.stream(*MODES.get(mode, (0, None)))}
    sides = ["decode"] if mode == "alone" else ["decode", "tower"]
    with ThreadPoolExecutor(len(sides)) as threads:
        prepared = [threads.submit(_prepared, model, device, side, streams[side]) for side in sides]
        loops = [one.result() for one in prepared]
        start_s = time.monotonic() + 0.1
        end_s = start_s + (_TINY_SECONDS if tiny else _SECONDS)
        runs = [threads.submit(loop, start_s, end_s) for loop in loops]
        times = [run.result() for run in runs]
    return _figures(times[0], times[1] if len(times) > 1 else [])


def _prepared(model: _Model, device: Device, side: str, stream: Stream) -> Callable[[float, float], list[float]]:
    """A loop over one side's work between two points of the monotonic clock, for the seconds of each call."""
    if side == "tower":
        work = model._encode_call(1)
    else:
        work = partial(model._graphs.compute, model._inputs(decodes=model.batches[-1]))
    device.synchronize()  # the weights were loaded on another stream

    def loop(start_s: float, end_s: float) -> list[float]:
        device.activate()
        times: list[float] = []
        time.sleep(max(0.0, start_s - time.monotonic()))
        with torch.inference_mode(), stream:
            while not times or time.monotonic() < end_s:
                begun = time.monotonic()
                work()
                stream.synchronize()
                times.append(time.monotonic() - begun)
        return times

    for _ in range(3):
        loop(0.0, 0.0)
    return loop


def _figures(decodes: list[float], encodes: list[float]) -> dict[str, float]:
    result = {"tpot_ms": 1e3 * median(decodes)}
    if len(decodes) > 1:
        result["tpot_p99_ms"] = 1e3 * quantiles(decodes, n=100, method="inclusive")[98]
    if encodes:
        result["encodes_s"] = len(encodes) / sum(encodes)
    return result


def _in_two_processes(path: Path, device: str, environment: dict[str, str], *, tiny: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.colocation", "--device", device, "--model", str(path)]
    sides = [
        subprocess.Popen(
            [*command, "--side", side, *(["--tiny"] if tiny else [])],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for side in ("decode", "tower")
    ]
    try:
        for side in sides:
            assert side.stdout is not None
            if side.stdout.readline() != "ready\n":
                raise RuntimeError(f"a side of the measurement ended with exit code {side.wait()}")
        start_s = time.monotonic() + 0.2
        end_s = start_s + (_TINY_SECONDS if tiny else _SECONDS)
        times = [json.loads(side.communicate(f"{start_s} {end_s}\n", timeout=_LOAD_S)[0]) for side in sides]
    finally:
        for side in sides:
            side.kill()
            side.wait()
    return _figures(*times)


def _under_mps(path: Path, device: Device, directory: Path, *, tiny: bool) -> dict[str, float] | str:
    """Both processes with a share each: of the tower TOWER_SHARE, of decodes the rest."""
    environment = {**os.environ, **mps.share_variables(TOWER_SHARE)}
    if device.type != "cuda":
        return "not run: no NVIDIA GPU"
    if mps.is_running(environment):
        return _in_two_processes(path, device.name, environment, tiny=tiny)
    try:
        environment |= mps.own_daemon(directory, environment)
    except ValueError as error:
        return f"not run: {error}"
    keeper = subprocess.Popen([sys.executable, "-m", "device.mps", str(os.getpid())], env=environment)
    try:
        until_s = time.monotonic() + 20
        while not mps.is_running(environment):
            if keeper.poll() is not None or time.monotonic() > until_s:
                return f"not run: {mps.CONTROL} -d does not start"
            time.sleep(0.1)
        return _in_two_processes(path, device.name, environment, tiny=tiny)
    finally:
        keeper.terminate()
        keeper.wait()


def _be_side(name: str, side: str, path: Path, *, tiny: bool) -> int:
    """One process: says that it is ready, reads the times to begin and to end, writes the seconds of each call."""
    device = get_device(name)
    device.activate()
    loop = _prepared(_Model(path, device, {}, tiny=tiny), device, side, device.stream())
    print("ready", flush=True)
    start_s, end_s = map(float, sys.stdin.readline().split())
    print(json.dumps(loop(start_s, end_s)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=("tower", "decode"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        return _be_side(arguments.device, arguments.side, arguments.model, tiny=arguments.tiny)
    kinds = ("h100", "h200", "a100", "ascend-910b3")
    result = {
        "command": "python -m benchmarks.colocation",
        "work": "128 decodes at 1024 tokens beside pictures of 896x896, Qwen2.5-VL-7B, times of data sheets",
        **{kind: {mode: emulate(kind, mode) for mode in ("alone", *MODES)} for kind in kinds},
    }
    write(RESULTS / "colocation-emulated.json", result)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
