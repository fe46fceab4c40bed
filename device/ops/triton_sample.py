"""Draw tokens without sorting the vocabulary, in Triton.

One kernel reads the scores once, with many programs per row, and stores each block's largest score and sum of
weights. A second kernel, with one program per row, reads only relevant blocks: for the k-th largest score, blocks
whose maximum is among the k largest maxima; for a draw, the block that contains it.

If top-p rejects a draw from the whole distribution, it also rejects all tokens of equal or lower probability; the
next draw is from the rest. This takes about 1 - ln(top_p) draws. Radix selection, 8 bits per pass, finds the k-th
largest score. Random numbers are Philox 4x64-10 of the row's counters.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Scores per block, each with one maximum and one sum of weights."""
TILE = 16
"""Blocks read together by a program."""


@triton.jit
def _uniform(seed, choice, position, attempt):
    """Return a float64 in [0, 1) with 53 random bits; all counters are int64."""
    first, second = position.to(tl.uint64), attempt.to(tl.uint64)
    third, fourth = tl.full([], 0, tl.uint64), tl.full([], 0, tl.uint64)
    key_0, key_1 = seed.to(tl.uint64), choice.to(tl.uint64)
    left_factor = tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    right_factor = tl.full([], 0xCA5A826395121157, tl.uint64)
    left_step = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    right_step = tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    for _ in tl.static_range(10):
        left_high, left_low = tl.umulhi(left_factor, first), left_factor * first
        right_high, right_low = tl.umulhi(right_factor, third), right_factor * third
        first, second = right_high ^ second ^ key_0, right_low
        third, fourth = left_high ^ fourth ^ key_1, left_low
        key_0, key_1 = key_0 + left_step, key_1 + right_step
    # through int64, which holds the 53 bits: conversions from uint64 differ between platforms
    return (first >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _survey_kernel(
    scores,
    limits,
    maxima,
    sums,
    width,
    stride,
    num_blocks,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ALL: tl.constexpr,
):
    """Store each block's largest score, NaN if it contains one, and its sum of weights relative to the largest."""
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    some = tl.load(scores + row * stride + at, mask=at < width, other=float("-inf"))
    temperature = tl.load(limits + 4 * row)
    most = tl.max(tl.where(some != some, float("-inf"), some), axis=1)
    has_nan = tl.max((some != some).to(tl.int32), axis=1) > 0
    largest = tl.where(most > float("-inf"), most, 0.0)
    weights = tl.exp((some - largest[:, None]) / temperature)
    place = row * ALL + blocks
    tl.store(maxima + place, tl.where(has_nan, float("nan"), most), mask=blocks < num_blocks)
    tl.store(sums + place, tl.sum(weights, axis=1), mask=blocks < num_blocks)


@triton.jit
def _ordered(scores):
    """Return uint32 keys in the order of float32 scores."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (tl.where(bits < 0, ~bits, bits ^ -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _tile(base, live, first, count, width, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return places and scores [TILE, BLOCK] of the blocks listed in ``live`` from ``first`` on."""
    number = first + tl.arange(0, TILE)
    blocks = tl.load(live + number, mask=number < count, other=0)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (at < width) & (number < count)[:, None]
    return tl.where(inside, at, width), tl.load(base + at, mask=inside, other=float("-inf"))


@triton.jit
def _list_blocks(live, blocks, is_live):
    """Write the numbers of live blocks in order, and return their count."""
    tl.debug_barrier()  # all threads have read the previous list
    is_live = is_live.to(tl.int32)
    tl.store(live + tl.cumsum(is_live, axis=0) - 1, blocks, mask=is_live != 0)
    tl.debug_barrier()
    return tl.sum(is_live, axis=0)


@triton.jit
def _kth(base, live, count, width, top_k, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return a score and a place: the ``top_k`` largest scores exceed it, or equal it before that place."""
    rank = top_k
    key = tl.full([], 0, tl.uint32)
    digits = tl.arange(0, 256)
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for first in range(0, count, TILE):
            _, some = _tile(base, live, first, count, width, BLOCK, TILE)
            keys = tl.reshape(_ordered(some), (TILE * BLOCK,))
            # others count as the smallest digit, whose count is unused
            digit = tl.where((keys >> shift >> 8) == key, (keys >> shift) & 255, 0)
            counts += tl.histogram(digit.to(tl.int32), 256)
        ends = tl.cumsum(counts, axis=0, reverse=True)
        chosen = tl.max(tl.where(ends >= rank, digits, 0), axis=0)
        rank -= tl.sum(tl.where(digits > chosen, counts, 0), axis=0)
        key = (key << 8) | chosen.to(tl.uint32)
    bits = key.to(tl.int32, bitcast=True)
    score = tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)
    equals, last = tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
    for first in range(0, count, TILE):
        at, some = _tile(base, live, first, count, width, BLOCK, TILE)
        at, equal = tl.reshape(at, (TILE * BLOCK,)), tl.reshape((some == score).to(tl.int32), (TILE * BLOCK,))
        number = equals + tl.cumsum(equal, axis=0)
        last = tl.maximum(last, tl.max(tl.where((equal != 0) & (number <= rank), at, -1), axis=0))
        equals += tl.sum(equal, axis=0)
    return score, last + 1


@triton.jit
def _weights(some, at, best, temperature, min_p, low, low_at):
    """Return weights, the largest 1, of scores that exceed ``low`` or equal it before the place ``low_at``."""
    weights = tl.exp((some - best) / temperature)
    kept = (some > low) | ((some == low) & (at < low_at))
    return tl.where(kept & (weights >= min_p), weights, 0.0)


@triton.jit
def _weigh(
    base, live, sums, count, width, best, temperature, min_p, low, low_at, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Write the sums of the weights in the live blocks, and return their total."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, count, TILE):
        at, some = _tile(base, live, first, count, width, BLOCK, TILE)
        amounts = tl.sum(_weights(some, at, best, temperature, min_p, low, low_at), axis=1)
        number = first + tl.arange(0, TILE)
        tl.store(sums + number, amounts, mask=number < count)
        total += tl.sum(amounts.to(tl.float64), axis=0)
    tl.debug_barrier()
    return total


@triton.jit
def _invert(
    base,
    live,
    sums,
    count,
    width,
    best,
    temperature,
    min_p,
    low,
    low_at,
    target,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):
    """Return the token at which the sum of weights passes ``target``, and its score."""
    number = tl.arange(0, ALL)
    amounts = tl.load(sums + number, mask=number < count, other=0.0).to(tl.float64)
    ends = tl.cumsum(amounts, axis=0)
    # rounding may make this sum smaller than the total: then take the last one
    last = tl.max(tl.where(amounts > 0, number, 0), axis=0)
    chosen = tl.minimum(tl.min(tl.where((ends > target) & (amounts > 0), number, ALL), axis=0), last)
    before = tl.max(tl.where(number < chosen, ends, 0.0), axis=0)
    at = tl.load(live + chosen) * BLOCK + tl.arange(0, BLOCK)
    some = tl.load(base + at, mask=at < width, other=float("-inf"))
    weights = _weights(some, at, best, temperature, min_p, low, low_at)
    passed = (tl.cumsum(weights.to(tl.float64), axis=0) > target - before) & (weights > 0)
    last = tl.max(tl.where(weights > 0, at, 0), axis=0)
    token = tl.minimum(tl.min(tl.where(passed, at, width), axis=0), last)
    return token, tl.max(tl.where(at == token, some, float("-inf")), axis=0)


@triton.jit
def _draw_kernel(
    scores,
    counters,
    limits,
    maxima,
    sums,
    live,
    tokens,
    width,
    stride,
    num_blocks,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ALL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * stride
    maxima += row * ALL
    sums += row * ALL
    live += row * ALL
    seed = tl.load(counters + 3 * row)
    choice = tl.load(counters + 3 * row + 1)
    position = tl.load(counters + 3 * row + 2)
    temperature = tl.load(limits + 4 * row)
    min_p = tl.load(limits + 4 * row + 1)
    top_p = tl.load(limits + 4 * row + 2)
    top_k = tl.load(limits + 4 * row + 3).to(tl.int32)

    blocks = tl.arange(0, ALL)
    most = tl.load(maxima + blocks, mask=blocks < num_blocks, other=float("-inf"))
    no_number = tl.min(tl.where(most != most, blocks, ALL), axis=0)
    best = tl.max(tl.where(most != most, float("-inf"), most), axis=0)
    if no_number < ALL:
        at = no_number * BLOCK + tl.arange(0, BLOCK)
        some = tl.load(base + at, mask=at < width, other=0.0)
        tl.store(tokens + row, tl.min(tl.where(some != some, at, width), axis=0).to(tl.int64))
    elif best == float("-inf"):  # all tokens are forbidden
        tl.store(tokens + row, tl.full([], 0, tl.int64))
    else:
        low, low_at = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
        count = _list_blocks(live, blocks, blocks < num_blocks)
        if (top_k > 0) & (top_k < width):
            if top_k <= num_blocks:  # at least top_k scores reach the k-th largest block maximum
                least, _ = _kth(maxima, live, (num_blocks + BLOCK - 1) // BLOCK, num_blocks, top_k, BLOCK, TILE)
                count = _list_blocks(live, blocks, (most >= least) & (blocks < num_blocks))
            low, low_at = _kth(base, live, count, width, top_k, BLOCK, TILE)
        if (low > float("-inf")) | (min_p > 0):
            is_live = (most >= low) & (tl.exp((most - best) / temperature) >= min_p)
            count = _list_blocks(live, blocks, is_live & (blocks < num_blocks))
            total = _weigh(base, live, sums, count, width, best, temperature, min_p, low, low_at, BLOCK, TILE)
        else:
            amounts = tl.load(sums + blocks, mask=blocks < num_blocks, other=0.0)
            amounts *= tl.exp((most - best) / temperature)
            tl.debug_barrier()  # several threads read each sum where there are fewer sums than threads
            tl.store(sums + blocks, amounts, mask=blocks < num_blocks)
            total = tl.sum(amounts.to(tl.float64), axis=0)
            tl.debug_barrier()
        mass = total
        attempt = tl.full([], 0, tl.int64)
        goes_on = attempt == 0
        token = tl.full([], 0, tl.int32)
        while goes_on:
            target = _uniform(seed, choice, position, attempt) * mass
            token, score = _invert(
                base, live, sums, count, width, best, temperature, min_p, low, low_at, target, BLOCK, ALL
            )
            goes_on = top_p < 1.0
            if goes_on:
                low, low_at = score, tl.full([], 0, tl.int32)
                count = _list_blocks(live, blocks, most > low)
                mass = _weigh(base, live, sums, count, width, best, temperature, min_p, low, low_at, BLOCK, TILE)
                goes_on = (mass > 0) & (mass >= top_p * total)
            attempt += 1
        tl.store(tokens + row, token.to(tl.int64))


def draw(scores: Tensor, counters: Tensor, limits: Tensor) -> Tensor:
    """Fills :class:`device.base.Draw`."""
    assert scores.dtype == limits.dtype == torch.float32 and counters.dtype == torch.int64
    assert scores.stride(1) == 1 and counters.is_contiguous() and limits.is_contiguous()
    num_rows, width = scores.shape
    num_blocks = triton.cdiv(width, BLOCK)
    all_blocks = max(16, triton.next_power_of_2(num_blocks))  # aligned rows: otherwise each count recompiles
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    maxima, sums = torch.empty(2, num_rows, all_blocks, device=scores.device).unbind(0)
    live = torch.empty(num_rows, all_blocks, dtype=torch.int32, device=scores.device)
    sizes = width, scores.stride(0), num_blocks
    tiles = {"BLOCK": BLOCK, "TILE": TILE, "ALL": all_blocks}
    _survey_kernel[triton.cdiv(num_blocks, TILE), num_rows](
        scores, limits, maxima, sums, *sizes, **tiles, num_warps=4
    )
    _draw_kernel[(num_rows,)](scores, counters, limits, maxima, sums, live, tokens, *sizes, **tiles, num_warps=8)
    return tokens
