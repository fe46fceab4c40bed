"""Drawing tokens from a vocabulary that is never sorted, in Triton: one program a row, a few passes over it.

A draw from the whole distribution is thrown away where top-p does not keep it, and with it all that is no
likelier; the next draw is among the rest. About 1 - ln(top_p) draws are enough. The k-th largest score is found by
bisection over the bits of float32. Random numbers are Philox 4x64-10 of the row's own counters.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Scores that a program looks at together."""


@triton.jit
def _uniform(seed, choice, position, attempt):
    """In [0, 1), of 53 bits, as float64; all counters are int64."""
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
    # through int64: it has 53 bits, and conversions from uint64 are not everywhere the same
    return (first >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _ordered(scores):
    """int32 in the order of float32 scores."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weights(base, start, width, best, temperature, min_p, low, low_at, BLOCK: tl.constexpr):
    """Weights, the largest 1, of scores that lie above ``low``, or equal it before the place ``low_at``."""
    at = start + tl.arange(0, BLOCK)
    scores = tl.load(base + at, mask=at < width, other=float("-inf"))
    weights = tl.exp((scores - best) / temperature)
    kept = (scores > low) | ((scores == low) & (at < low_at))
    return at, scores, tl.where(kept & (weights >= min_p), weights, 0.0)


@triton.jit
def _draw_kernel(scores, counters, limits, tokens, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = scores + row * stride
    seed = tl.load(counters + 3 * row)
    choice = tl.load(counters + 3 * row + 1)
    position = tl.load(counters + 3 * row + 2)
    temperature = tl.load(limits + 4 * row)
    min_p = tl.load(limits + 4 * row + 1)
    top_p = tl.load(limits + 4 * row + 2)
    top_k = tl.load(limits + 4 * row + 3).to(tl.int32)

    best = tl.full([], float("-inf"), tl.float32)
    no_number = width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(base + at, mask=at < width, other=float("-inf"))
        no_number = tl.minimum(no_number, tl.min(tl.where(some != some, at, width), axis=0))
        best = tl.maximum(best, tl.max(tl.where(some != some, float("-inf"), some), axis=0))

    if no_number < width:
        tl.store(tokens + row, no_number.to(tl.int64))
    elif best == float("-inf"):  # all are forbidden
        tl.store(tokens + row, tl.full([], 0, tl.int64))
    else:
        low, low_at = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
        if (top_k > 0) & (top_k < width):
            low, low_at = _kth(base, width, top_k, BLOCK)
        total = tl.full([], 0.0, tl.float64)
        for start in range(0, width, BLOCK):
            _, _, weights = _weights(base, start, width, best, temperature, min_p, low, low_at, BLOCK)
            total += tl.sum(weights, axis=0).to(tl.float64)
        mass = total
        attempt = tl.full([], 0, tl.int64)
        goes_on = attempt == 0
        token = tl.full([], 0, tl.int32)
        while goes_on:
            target = _uniform(seed, choice, position, attempt) * mass
            token, score = _invert(base, width, best, temperature, min_p, low, low_at, target, BLOCK)
            goes_on = top_p < 1.0
            if goes_on:
                above = tl.full([], 0.0, tl.float64)
                for start in range(0, width, BLOCK):
                    _, _, weights = _weights(base, start, width, best, temperature, min_p, score, 0, BLOCK)
                    above += tl.sum(weights, axis=0).to(tl.float64)
                goes_on = (above > 0) & (above >= top_p * total)
                low, low_at, mass = score, tl.full([], 0, tl.int32), above
            attempt += 1
        tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _kth(base, width, top_k, BLOCK: tl.constexpr):
    """The score and the place of which the ``top_k`` largest scores lie above, or equal it before the place."""
    low, high = tl.full([], -2147483648, tl.int64), tl.full([], 2147483647, tl.int64)
    while low < high:  # the smallest score that fewer than top_k lie above
        middle = (low + high) >> 1
        count = tl.full([], 0, tl.int32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            some = tl.load(base + at, mask=at < width, other=float("-inf"))
            count += tl.sum(((_ordered(some).to(tl.int64) > middle) & (at < width)).to(tl.int32), axis=0)
        if count < top_k:
            high = middle
        else:
            low = middle + 1
    above = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(base + at, mask=at < width, other=float("-inf"))
        above += tl.sum(((_ordered(some).to(tl.int64) > low) & (at < width)).to(tl.int32), axis=0)
    equals, last = tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(base + at, mask=at < width, other=float("-inf"))
        equal = ((_ordered(some).to(tl.int64) == low) & (at < width)).to(tl.int32)
        number = equals + tl.cumsum(equal, axis=0)
        last = tl.maximum(last, tl.max(tl.where((equal != 0) & (number <= top_k - above), at, -1), axis=0))
        equals += tl.sum(equal, axis=0)
    key = low.to(tl.int32)
    score = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    return score, last + 1


@triton.jit
def _invert(base, width, best, temperature, min_p, low, low_at, target, BLOCK: tl.constexpr):
    """The token at which the sum of weights passes ``target``, and its score."""
    before = tl.full([], 0.0, tl.float64)
    token, score = tl.full([], -1, tl.int32), tl.full([], 0.0, tl.float32)
    last, last_score = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    is_open = token < 0
    for start in range(0, width, BLOCK):
        at, some, weights = _weights(base, start, width, best, temperature, min_p, low, low_at, BLOCK)
        amount = tl.sum(weights, axis=0).to(tl.float64)
        if is_open & (amount > 0):
            last = tl.max(tl.where(weights > 0, at, -1), axis=0)
            last_score = tl.sum(tl.where(at == last, some, 0.0), axis=0)
            if before + amount > target:
                ends = tl.cumsum(weights, axis=0)
                passed = (ends > (target - before).to(tl.float32)) & (weights > 0)
                # sums of another order may be smaller by a rounding: then it is the last one
                token = tl.minimum(tl.min(tl.where(passed, at, 2147483647), axis=0), last)
                score = tl.sum(tl.where(at == token, some, 0.0), axis=0)
                is_open = token < 0
        before += amount
    return tl.where(is_open, last, token), tl.where(is_open, last_score, score)


def draw(scores: Tensor, counters: Tensor, limits: Tensor) -> Tensor:
    """Fills :class:`device.base.Draw`."""
    assert scores.dtype == limits.dtype == torch.float32 and counters.dtype == torch.int64
    assert scores.stride(1) == 1 and counters.is_contiguous() and limits.is_contiguous()
    tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    _draw_kernel[(len(scores),)](
        scores, counters, limits, tokens, scores.shape[1], scores.stride(0), BLOCK=BLOCK, num_warps=8
    )
    return tokens
