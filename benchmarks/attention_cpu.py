"""The CPU's operators against other formulations of the same in plain torch, all in one run.

    python -m benchmarks.attention_cpu [--threads 1 2] [--output file.json]

Rounds alternate between the formulations; a ratio is the median over the rounds of (its time / our time): above 1
it is slower than what ships. One thread is timed by the processor time that it used, so that other programs do not
count in full; two threads by the clock, which needs an idle machine. Takes about two minutes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import argument_parser, typed, write
from device.check_batch import Batch
from device.host import processor_name
from device.ops.cpu import CpuOps
from device.ops.plain import PlainOps

Call = Callable[[], object]
BLOCK_SIZE = 16
_ROUNDS = 7
_ROUND_S = 0.004
_DTYPES = (torch.bfloat16, torch.float32)


def main() -> None:
    parser = argument_parser(__doc__, "attention-cpu.json")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    for threads in options.threads:
        torch.set_num_threads(threads)
        for kind, case, calls in _cases(_DTYPES if threads == 1 else _DTYPES[:1]):
            our_us, ratios = race(calls, time.process_time if threads == 1 else time.perf_counter)
            rows.append({"kind": kind, "case": case, "threads": threads, "ours_us": our_us, "ratios": ratios})
            others = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"{threads} thread  {kind:8s} {case:44s} {our_us:9.0f} us   {others}", flush=True)
    result = {
        "processor": processor_name(),
        "torch": torch.__version__,
        "command": typed("attention_cpu"),
        "seconds": round(time.monotonic() - started),
        "rows": rows,
    }
    write(options.output, result)


def race(calls: Mapping[str, Call], clock: Callable[[], float]) -> tuple[float, dict[str, float]]:
    """Microseconds of "ours", and each other's time as a multiple of it."""
    for call in calls.values():
        call()
    start = time.perf_counter()
    calls["ours"]()
    repeats = max(1, int(_ROUND_S / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats):
                call()
            seconds[name].append((clock() - start) / repeats)
    ours = seconds.pop("ours")
    ratios = {
        name: round(statistics.median(theirs / own for theirs, own in zip(times, ours, strict=True)), 2)
        for name, times in seconds.items()
    }
    return round(statistics.median(ours) * 1e6, 1), ratios


def _cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, str, dict[str, Call]]]:
    for dtype in dtypes:
        for batch, context, group, head_dim in (
            (1, 128, 4, 64),
            (1, 1024, 1, 64),
            (1, 4096, 8, 128),
            (8, 128, 4, 64),
            (8, 1024, 1, 64),
            (8, 1024, 8, 128),
            (32, 128, 4, 64),
            (32, 1024, 4, 64),
            (32, 1024, 8, 128),
        ):
            contexts = [context - i % 5 for i in range(batch)]
            yield _decode(f"{batch} x {context}", contexts, group, head_dim, dtype)
        yield _decode("31 x 100..1200 and 4000", [4000, *(100 + 37 * i for i in range(31))], 4, 128, dtype)
        for tokens, past in ((256, 0), (1024, 0), (2048, 0), (256, 1792), (1024, 1024)):
            yield _prefill(tokens, past, 4, 64, dtype)
        for patches, windows in ((1024, 16), (1024, 1), (2048, 1)):
            yield _encode(patches, windows, 8, 80, dtype)
        for tokens in (1, 32, 512):
            yield from _layers(tokens, dtype)
    yield _decode("8 x 1024", [1024] * 8, 8, 128, torch.float16)
    yield _prefill(256, 1792, 4, 64, torch.float16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _decode(
    name: str, contexts: list[int], group: int, head_dim: int, dtype: torch.dtype
) -> tuple[str, str, dict[str, Call]]:
    kv_heads = 8 if group == 1 else 2
    batch = Batch(
        contexts,
        [],
        block_size=BLOCK_SIZE,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        seed=0,
        spare_columns=0,
    )
    meta, scale = batch.meta, batch.scale
    query, kv_layer = batch.query.to(dtype), batch.kv_layer.nan_to_num(0.0).to(dtype)
    states = (query, batch.key.to(dtype), batch.value.to(dtype), kv_layer)
    ours, plain = CpuOps(), PlainOps()
    plan, plain_plan = ours.prepare(meta, dtype), plain.prepare(meta, dtype)
    mask = plain_plan.decode_mask
    assert mask is not None

    def gather() -> tuple[Tensor, Tensor]:
        keys, values = (
            pages.index_select(0, meta.decode_block_table.reshape(-1))
            .view(len(contexts), -1, kv_heads, head_dim)
            .transpose(1, 2)
            for pages in kv_layer.unbind(0)
        )
        return keys, values

    def gqa() -> Tensor:
        keys, values = gather()
        return F.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )

    def matmuls() -> Tensor:
        keys, values = gather()
        scores = query.view(len(contexts), kv_heads, group, head_dim) * scale @ keys.transpose(2, 3)
        return torch.softmax(scores + mask, dim=-1) @ values

    def loop() -> list[Tensor]:
        outputs: list[Tensor] = []
        for one, table, context in zip(query, meta.decode_block_table, contexts, strict=True):
            keys, values = (
                pages.index_select(0, table[: -(-context // BLOCK_SIZE)])
                .flatten(0, 1)[None, :context]
                .transpose(1, 2)
                for pages in kv_layer.unbind(0)
            )
            folded = one.view(1, kv_heads, group, head_dim)
            outputs.append(F.scaled_dot_product_attention(folded, keys, values, scale=scale))
        return outputs

    calls: dict[str, Call] = {
        "ours": lambda: ours.attend(*states, plan, scale),
        "one gather": lambda: plain.attend(*states, plain_plan, scale),
        "enable_gqa": gqa,
        "matmuls": matmuls,
        "loop": loop,
    }
    return "decode", f"{name}, {kv_heads} KV heads x {group}, d {head_dim}, {_name(dtype)}", calls


def _prefill(
    tokens: int, past: int, group: int, head_dim: int, dtype: torch.dtype
) -> tuple[str, str, dict[str, Call]]:
    batch = Batch(
        [], [(tokens, tokens + past)], block_size=BLOCK_SIZE, kv_heads=2, group=group, head_dim=head_dim, seed=0
    )
    ours, plain = CpuOps(), PlainOps()
    kv_layer = batch.kv_layer.nan_to_num(0.0).to(dtype)
    states = (batch.query.to(dtype), batch.key.to(dtype), batch.value.to(dtype))
    ours.write_kv(states[1], states[2], kv_layer, batch.meta.slot_mapping)
    plan, plain_plan = ours.prepare(batch.meta, dtype), plain.prepare(batch.meta, dtype)
    mask = torch.full((tokens, tokens + past), float("-inf"), dtype=dtype).triu_(past + 1)
    query, keys, values = (
        states_.to(dtype).transpose(0, 1)[None] for states_ in (batch.query, batch.dense[0][0], batch.dense[0][1])
    )

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    def repeated() -> Tensor:
        wide = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        if past:
            return F.scaled_dot_product_attention(query, *wide, attn_mask=mask)
        return F.scaled_dot_product_attention(query, *wide, is_causal=True)

    def folded() -> Tensor:
        rows = query.unflatten(1, (2, group)).flatten(2, 3)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask.repeat(group, 1))

    calls: dict[str, Call] = {
        "ours": lambda: ours.attend(*states, kv_layer, plan, batch.scale),
        "whole chunk": lambda: plain.attend(*states, kv_layer, plain_plan, batch.scale),
        "mask": masked,
        "repeated heads": repeated,
        "folded heads": folded,
    }
    return "prefill", f"{tokens} after {past}, 2 KV heads x {group}, d {head_dim}, {_name(dtype)}", calls


def _encode(
    patches: int, windows: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[str, str, dict[str, Call]]:
    query, key, value = torch.randn(patches, 3, heads, head_dim).to(dtype).unbind(1)
    length, scale = patches // windows, head_dim**-0.5
    borders = list(range(0, patches + 1, length))
    ours = CpuOps()

    def split() -> list[Tensor]:
        return [states.view(windows, length, heads, -1).transpose(1, 2) for states in (query, key, value)]

    def loop() -> Tensor:
        each = zip(*(states.split(1) for states in split()), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*states) for states in each])

    def padded() -> Tensor:
        wide = [F.pad(states, (0, 128 - head_dim)) for states in split()]
        return F.scaled_dot_product_attention(*wide, scale=scale)

    def matmuls() -> Tensor:
        queries, keys, values = split()
        return torch.softmax(queries * scale @ keys.transpose(2, 3), dim=-1) @ values

    calls: dict[str, Call] = {
        "ours": lambda: ours.encode(query, key, value, borders, scale),
        "loop": loop,
        "padded to 128": padded,
        "matmuls": matmuls,
    }
    return "encode", f"{patches} patches, {windows} windows, {heads} heads, d {head_dim}, {_name(dtype)}", calls


def _layers(tokens: int, dtype: torch.dtype) -> Iterator[tuple[str, str, dict[str, Call]]]:
    ours, plain = CpuOps(), PlainOps()
    case = f"{tokens} tokens, {_name(dtype)}"
    hidden, weight = torch.randn(tokens, 896).to(dtype), torch.randn(896).to(dtype)

    def by_hand() -> Tensor:
        exact = hidden.float()
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)).to(dtype) * weight

    norm: dict[str, Call] = {"ours": lambda: ours.rms_norm(hidden, weight, 1e-6), "by hand": by_hand}
    yield "rms_norm", case, norm
    query, key = torch.randn(tokens, 18, 64).to(dtype)[:, :16].split([14, 2], dim=1)
    cos, sin = torch.randn(2, tokens, 64).unbind(0)
    rotary: dict[str, Call] = {
        "ours": lambda: ours.rotary(query, key, cos, sin),
        "one by one": lambda: plain.rotary(query, key, cos, sin),
    }
    yield "rotary", case, rotary
    gate_up = torch.randn(tokens, 9728).to(dtype)
    gate: dict[str, Call] = {
        "ours": lambda: ours.swiglu(gate_up),
        "out of place": lambda: plain.swiglu(gate_up),
    }
    yield "swiglu", case, gate
    if tokens <= 32:
        logits = torch.randn(tokens, 151_936).to(dtype)
        largest: dict[str, Call] = {"ours": lambda: ours.argmax(logits), "argmax": lambda: plain.argmax(logits)}
        yield "argmax", case, largest


if __name__ == "__main__":
    main()
