"""Smoke test of one device, comparing its operators with plain torch in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from device import copies
from device.base import AttentionOps, AttnMeta, Device
from device.ops.plain import PlainOps

#: Returns its measurement as text; raises on failure.
Check = Callable[[Device], str]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One row of ``epd-serve devices --check``; ``detail``: the measurement, or the fault."""

    check: str
    passed: bool
    detail: str


def check_device(device: Device, more: Mapping[str, Check] | None = None) -> Iterator[CheckResult]:
    """Run the checks one by one, then ``more``; a check that raises yields a failed row."""
    checks: dict[str, Check] = {
        f"operators, {str(dtype).removeprefix('torch.')}": partial(_operators, dtype=dtype)
        for dtype in device.dtypes
    }
    checks |= {"captured decode step": _graph, "memory": _copies, "streams": _streams}
    # in a thread: its future holds any exception of the check
    with ThreadPoolExecutor(1, initializer=device.activate) as worker:
        for name, check in {**checks, **(more or {})}.items():
            future = worker.submit(check, device)
            error = future.exception()
            detail = future.result() if error is None else f"{type(error).__name__}: {error}"[:500]
            yield CheckResult(check=name, passed=error is None, detail=detail)


def random_step(
    ops: AttentionOps,
    where: torch.device,
    dtype: torch.dtype,
    *chunks: tuple[int, int],
    size: int,
) -> tuple[AttnMeta, Callable[[], Tensor]]:
    """Return one layer of a step of (query, context) chunks, decodes first, with reproducible numbers.

    ``size``: tokens of a block. There are two KV heads, and four query heads for each.
    """
    heads = 2
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    counts = [-(-context // size) for _, context in chunks]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1
    tables, slots = torch.zeros(len(chunks), max(counts), dtype=torch.int32), []
    for table, taken, (query_len, context) in zip(tables, torch.split(blocks, counts), chunks, strict=True):
        table[: len(taken)] = taken
        places = torch.arange(context - query_len, context)
        slots.append(taken[places // size] * size + places % size)
    decodes = [context for query_len, context in chunks if query_len == 1]
    meta = AttnMeta(
        block_size=size,
        slot_mapping=torch.cat(slots).to(where),
        num_decodes=len(decodes),
        decode_block_table=tables[: len(decodes)].to(where),
        decode_context_lens=torch.tensor(decodes, dtype=torch.int64).to(where),
        decode_context_lens_host=decodes,
        prefill_query_lens=[query_len for query_len, _ in chunks[len(decodes) :]],
        prefill_context_lens=[context for _, context in chunks[len(decodes) :]],
        prefill_block_table=tables[len(decodes) :].to(where),
    )
    rows = len(meta.slot_mapping)
    shapes = (rows, 4 * heads, 128), (rows, heads, 128), (rows, heads, 128), (2, 1 + sum(counts), size, heads, 128)
    query, key, value, kv_layer = (random(shape).to(where, dtype) for shape in shapes)

    def step() -> Tensor:
        plan = ops.prepare(meta, dtype)
        ops.write_kv(key, value, kv_layer, meta.slot_mapping)
        return ops.attend(query, key, value, kv_layer, plan, 128**-0.5)

    return meta, step


def _compare(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error as a fraction of 1 + the expected magnitude."""
    error = float(((actual.cpu().float() - expected).abs() / (1 + expected.abs())).max())
    assert error <= TOLERANCES[dtype], f"numbers differ from plain torch's by {error:.2g}"  # NaN fails too
    return error


def _block_size(device: Device) -> int:
    """Return the tokens of a KV block: an NPU's prefill needs multiples of 128."""
    return 128 if device.type == "npu" else 16


def _operators(device: Device, dtype: torch.dtype) -> str:
    """Check attention of a mixed step and of a tower, norms and SwiGLU."""
    chunks, where = [(1, 1), (1, 17), (1, 300), (33, 33), (16, 100)], device.torch_device
    step_of = partial(random_step, size=_block_size(device))
    _, step = step_of(device.ops, where, dtype, *chunks)
    _, plain_step = step_of(PlainOps(), torch.device("cpu"), torch.float32, *chunks)
    states = torch.randn(3, 165, 2, 80, generator=torch.Generator().manual_seed(0)).to(dtype)

    def rest(ops: AttentionOps, states: Tensor) -> Tensor:
        query, key, value = states
        encoded = ops.encode(query, key, value, [0, 64, 165], 80**-0.5).flatten(1)
        normed, total = ops.add_rms_norm(query.flatten(1), key.flatten(1), value[0].flatten(), 1e-6)
        return torch.cat((encoded, normed, total, ops.swiglu(query.flatten(1))), dim=1)

    error = _compare(step(), plain_step(), dtype)
    error = max(error, _compare(rest(device.ops, states.to(where)), rest(PlainOps(), states.float()), dtype))
    return f"largest error {error:.1e} (tolerance {TOLERANCES[dtype]:.0e})"


def _graph(device: Device) -> str:
    """Check a captured decode step, replayed with other lengths than captured."""
    dtype, runner = device.dtypes[0], device.graph_runner()
    step_of = partial(random_step, size=_block_size(device))
    meta, step = step_of(device.ops, device.torch_device, dtype, (1, 40), (1, 300))
    plain_meta, plain_step = step_of(PlainOps(), torch.device("cpu"), torch.float32, (1, 40), (1, 300))
    runner.capture(2, step)
    for lens in ([40, 300], [33, 129], [1, 2]):
        for one in (meta, plain_meta):
            one.decode_context_lens.copy_(torch.tensor(lens))
        runner.update(2, lens)
        _compare(runner.replay(2), plain_step(), dtype)
    return runner.name


def _copies(device: Device) -> str:
    """Check copies of 8 MiB to the device and back, from pageable and pinned memory."""
    total, free = device.memory()
    assert 0 < free <= total, f"{free} of {total} bytes free"
    source = torch.randint(-128, 128, (1 << 23,), dtype=torch.int8)
    pinned = source if device.type == "cpu" else copies.pin(source, device.torch_device)
    for host in (source, pinned):
        there = host.to(device.torch_device, non_blocking=True, copy=True)
        device.synchronize()
        assert torch.equal(there.cpu(), source), "the copy changed the bytes"
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _streams(device: Device) -> str:
    """Check that work waiting for another stream's event sees that stream's results."""
    side, data = device.stream(), torch.zeros(1 << 21, device=device.torch_device)
    device.synchronize()
    with side:
        for _ in range(20):
            data += 1
        end = device.record_event()
    device.current_stream().wait_event(end)
    assert float(data.sum(dtype=torch.float64)) == 20 * data.numel(), "work started before the event it waits for"
    return "in order" if device.has_streams else "nothing to overlap"
