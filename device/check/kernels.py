"""The self-test of one device: does what it computes, keeps, orders, captures and sends come out right?

Nothing here is specific to a vendor: everything goes through the Device protocol, and the oracle runs on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from device.base import Device, Stream
from device.check.batch import Batch
from device.check.operators import Comparison, compare
from device.emulated.accelerator import EmulatedDevice
from device.emulated.timeline import Demand
from device.ops.reference import ReferenceOps

Check = Callable[[Device], str]
"""Raises whatever is wrong; returns what it measured, in words."""

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_MEBIBYTE = 1 << 20
_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One row of ``epd-serve devices --check``."""

    check: str
    passed: bool
    detail: str
    """The measurement, or the fault where the check failed."""
    seconds: float
    advice: str | None = None
    """The remedy where the check failed."""


def check_device(device: Device, more: Mapping[str, tuple[Check, str]] | None = None) -> Iterator[CheckResult]:
    """Run the checks one by one; a check that raises is a failed row, and the next one runs all the same.

    Args:
        more: checks from outside this package, with what to do when they fail.
    """
    # In a thread, because its future holds whatever a check raises.
    with ThreadPoolExecutor(1, initializer=device.activate) as worker:
        for name, (check, advice) in {**_checks(device), **(more or {})}.items():
            started = time.perf_counter()
            future = worker.submit(check, device)
            error = future.exception()
            yield CheckResult(
                check=name,
                passed=error is None,
                detail=future.result() if error is None else _reason(error),
                seconds=time.perf_counter() - started,
                advice=None if error is None else advice,
            )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text[:500]}"


def _checks(device: Device) -> dict[str, tuple[Check, str]]:
    operators = (
        f"do not serve on {device.name}: its answers would be wrong. Compare the versions of torch, the driver "
        "and the operators' library with the README, and report this table"
    )
    checks: dict[str, tuple[Check, str]] = {}
    for dtype in device.dtypes:
        name = str(dtype).removeprefix("torch.")
        checks[f"attention over the paged cache, {name}"] = (_of_dtype(_attention, dtype), operators)
        checks[f"vision tower's attention, {name}"] = (_of_dtype(_encode, dtype), operators)
        checks[f"norms, rotary, SwiGLU, argmax, {name}"] = (_of_dtype(_layers, dtype), operators)
    checks["memory"] = (
        _memory,
        "see which processes hold the device's memory (nvidia-smi, npu-smi info) and end them",
    )
    checks["host copies"] = (
        _copies,
        "look for device errors in dmesg; pinned memory may need a higher limit: ulimit -l unlimited",
    )
    checks["streams and events"] = (
        _streams,
        "work is not done in order, so results cannot be trusted: update driver and torch",
    )
    checks["shares of streams"] = (
        _shares,
        "tower_share would not hold here: update driver and torch, or leave it out",
    )
    checks["captured decode step"] = (
        _graph,
        "captured steps do not work with this driver and torch: update them; decode depends on it",
    )
    return checks


def _of_dtype(check: Callable[[Comparison], float], dtype: torch.dtype) -> Check:
    def checked(device: Device) -> str:
        tolerance = TOLERANCES[dtype]
        comparison = Comparison(ops=device.ops, dtype=dtype, device=device.torch_device, tolerance=tolerance)
        return f"largest error {check(comparison):.1e} (up to {tolerance:.0e} is right)"

    return checked


def _attention(comparison: Comparison) -> float:
    """Mixed steps, decodes alone, chunks alone, and one step of nothing."""
    errors = [0.0]
    # whether the vendor's operator bears NaN behind a context, where it reads at all, is not known
    leftovers = 9.0 if comparison.device.type == "npu" else float("nan")
    steps: Sequence[tuple[Sequence[int], Sequence[tuple[int, int]]]] = (
        ([1, 17, 128, 300], [(33, 33), (16, 100), (1, 40)]),
        ([700], []),
        ([], [(64, 64), (20, 84)]),
        ([], []),
    )
    for block_size, group, head_dim in ((16, 4, 128), (128, 7, 64)):
        for decodes, prefills in steps:
            batch = Batch(
                decodes,
                prefills,
                block_size=block_size,
                kv_heads=2,
                group=group,
                head_dim=head_dim,
                padding=2 if decodes else 0,
                layout="fused",
                leftovers=leftovers,
                seed=len(decodes),
            )
            errors.append(comparison.step(batch))
    return max(errors)


def _encode(comparison: Comparison) -> float:
    return max(comparison.encode([64, 64, 0, 1, 100], 2, head_dim) for head_dim in (64, 72, 80, 96))


def _layers(comparison: Comparison) -> float:
    errors = [comparison.argmax(4, 151_936)]
    for tokens in (1, 33):
        errors += [comparison.norms((tokens, 896)), comparison.norms((tokens, 14, 128))]
        errors += [comparison.rotary(tokens, 14, 2, 128), comparison.swiglu(tokens, 4864)]
    return max(errors)


def _memory(device: Device) -> str:
    """Fills memory and reads it; where allocations can be capped, goes beyond the cap."""
    total, free = device.memory()
    assert 0 < free <= total, f"{free} of {total} bytes free"
    count = 64 * _MEBIBYTE // 8
    numbers = torch.arange(count, device=device.torch_device)
    assert int(numbers.sum()) == count * (count - 1) // 2, "memory does not hold what was written"
    del numbers
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if "memory fraction" not in device.partition.mechanisms:
        return f"{text}; no cap on this device"
    # A twentieth of the device, and an allocation twice as large.
    device.set_memory_fraction(0.05)
    try:
        torch.empty(total // 10, dtype=torch.uint8, device=device.torch_device)
    except RuntimeError:  # torch.OutOfMemoryError is one
        return f"{text}; the cap holds"
    finally:
        device.set_memory_fraction(1.0)
    raise AssertionError("an allocation of twice the memory fraction was granted")


def _copies(device: Device) -> str:
    """64 MiB to the device and back, from pinned memory and ordinary."""
    source = torch.randint(-128, 128, (64 * _MEBIBYTE,), dtype=torch.int8)
    speeds: list[float] = []
    for host in (source, device.pin_memory(source)):
        device.synchronize()
        started = time.perf_counter()
        there = host.to(device.torch_device, non_blocking=True, copy=True)
        device.synchronize()
        speeds.append(host.nbytes / (time.perf_counter() - started) / 1e9)
        assert torch.equal(there.cpu(), source), "the bytes came back changed"
    return f"to the device {rate_text(speeds[0])}, from pinned memory {rate_text(speeds[1])}"


def rate_text(gigabytes_per_s: float) -> str:
    """A rate in the unit in which it is no zero."""
    for unit in ("GB/s", "MB/s"):
        if gigabytes_per_s >= 0.1:
            return f"{gigabytes_per_s:.1f} {unit}"
        gigabytes_per_s *= 1e3
    return f"{gigabytes_per_s:.1f} kB/s"


def _streams(device: Device) -> str:
    """Check that a second stream's long work is over for a stream that waited for its event."""
    side = device.stream()
    data = torch.zeros(16 * _MEBIBYTE, device=device.torch_device)
    device.synchronize()
    start, end = device.event(enable_timing=True), device.event(enable_timing=True)
    with side:
        start.record(side)
        for _ in range(20):
            data += 1
        end.record(side)
    device.current_stream().wait_event(end)
    total = data.sum(dtype=torch.float64)
    done = device.record_event()
    done.synchronize()
    assert done.query(), "an event that was waited for is not done"
    assert total.item() == 20 * data.numel(), "work went on before the event that it waited for"
    return f"{start.elapsed_time(end):.1f} ms on the second stream" if device.has_streams else "nothing to overlap"


def _shares(device: Device) -> str:
    """Check that a stream with an eighth of the device takes longer, where the device limits streams."""
    try:
        limited = device.stream(share=0.125)
    except ValueError as error:
        return str(error)
    seconds = [min(_busy_s(device, stream) for _ in range(3)) for stream in (device.stream(), limited)]
    text = f"with an eighth of the arithmetic work takes {seconds[1] / seconds[0]:.1f} times as long"
    assert seconds[1] > 2 * seconds[0], text
    return text


def _busy_s(device: Device, stream: Stream) -> float:
    """Seconds of work on a stream that wants all of the arithmetic."""
    device.synchronize()
    started = time.perf_counter()
    with stream:
        if isinstance(device, EmulatedDevice):  # which computes as fast as the host, unless it is told a time
            with device.timed(0.01, Demand(compute=1.0, bandwidth=0.1)):
                pass
        else:
            matrix = torch.ones(4096, 4096, dtype=device.dtypes[-1], device=device.torch_device)
            for _ in range(8):
                matrix @ matrix
    stream.synchronize()
    return time.perf_counter() - started


def _graph(device: Device) -> str:
    """A captured decode step, replayed with other lengths than it was captured with."""
    dtype = torch.bfloat16 if torch.bfloat16 in device.dtypes else device.dtypes[0]
    ops, target = device.ops, device.torch_device
    batch = Batch([40, 300], [], block_size=16, kv_heads=2, group=4, head_dim=128, seed=0)
    meta = batch.meta_on(target)
    kv_layer = batch.kv_layer.nan_to_num(0.0).to(target, dtype)
    query, key, value = (states.to(target, dtype) for states in (batch.query, batch.key, batch.value))

    def step() -> Tensor:
        plan = ops.prepare(meta, dtype)
        ops.write_kv(key, value, kv_layer, meta.slot_mapping)
        return ops.attend(query, key, value, kv_layer, plan, batch.scale)

    runner = device.graph_runner()
    runner.capture(2, step)
    exact, oracle, error = batch.rounded(dtype), ReferenceOps(), 0.0
    for lens in ([40, 300], [33, 129], [1, 2]):
        meta.decode_context_lens.copy_(torch.tensor(lens))
        runner.update(2, lens)
        output = runner.replay(2)
        device.synchronize()
        seen = replace(batch.meta, decode_context_lens=torch.tensor(lens), decode_context_lens_host=lens)
        plan = oracle.prepare(seen, torch.float32)
        cache = kv_layer.cpu().float()  # with what the step wrote
        expected = oracle.attend(exact.query, exact.key, exact.value, cache, plan, batch.scale)
        error = max(error, compare(output, expected, dtype, TOLERANCES[dtype]))
    return f"{runner.name}; largest error {error:.1e}"
