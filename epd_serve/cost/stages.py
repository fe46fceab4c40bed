"""Amounts of work and their seconds, from which requests are routed.

The time of a stage is linear in pixels, tokens and sequences, with a base for each batch; a transfer depends on
the distance of the instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from epd_serve.types import StageRate

#: Rates before the first measurement, of a small model on a slow device. All instances are equal until then.
PRIOR_ENCODE = StageRate(0.01, 1e-7, is_fresh=False)
PRIOR_PREFILL = StageRate(0.01, 1e-4, is_fresh=False)
PRIOR_DECODE = StageRate(0.02, 1e-3, is_fresh=False)
PRIOR_OUTPUT_TOKENS = 128.0
MAX_BATCH_PIXELS = 8 * 1024**2
MAX_BATCH_TOKENS = 2048
#: Least cost of another sequence, as a part of a step's base, in case of a fit to few batch sizes.
_LEAST_SEQUENCE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """The times of one instance's stages.

    Attributes:
        max_batch_pixels, max_batch_tokens: limits of an encode batch and of a prefill step.
        mean_output_tokens: mean length of answers.
    """

    encode: StageRate = PRIOR_ENCODE
    prefill: StageRate = PRIOR_PREFILL
    decode: StageRate = PRIOR_DECODE
    max_batch_pixels: float = MAX_BATCH_PIXELS
    max_batch_tokens: float = MAX_BATCH_TOKENS
    mean_output_tokens: float = PRIOR_OUTPUT_TOKENS

    def encode_s(self, num_pixels: float) -> float:
        """Return the seconds to encode images in the largest batches allowed."""
        return _batches_s(self.encode, num_pixels, self.max_batch_pixels)

    def prefill_s(self, num_tokens: float) -> float:
        """Return the seconds to prefill prompts in the largest steps allowed."""
        return _batches_s(self.prefill, num_tokens, self.max_batch_tokens)

    def step_s(self, num_sequences: float) -> float:
        """Return the seconds of one decode step."""
        return self.decode.base_s + self._sequence_s * num_sequences

    def decode_s(self, num_sequences: float, num_active: float, num_tokens: float | None = None) -> float:
        """Return the cost of ``num_sequences`` answers of ``num_tokens`` next to ``num_active`` others.

        The sum of their own steps and of the delay of the others, which on average are half done.
        """
        own = self.mean_output_tokens if num_tokens is None else min(num_tokens, self.mean_output_tokens)
        sequence_s = self._sequence_s
        others = num_active * min(own, self.mean_output_tokens / 2) * sequence_s * num_sequences
        return own * (self.decode.base_s + sequence_s * (num_active + num_sequences)) + others

    def room_s(self, num_missing: float, num_held: float, num_active: float) -> float:
        """Return the seconds until ``num_missing`` KV tokens become free.

        ``num_held`` tokens become free as ``num_active`` sequences end; both count as 1 at least, in case reports
        are inconsistent.
        """
        if num_missing <= 0:
            return 0.0
        remaining_s = self.mean_output_tokens / 2 * self.step_s(max(num_active, 1))
        return remaining_s * num_missing / max(num_held, 1)

    @property
    def _sequence_s(self) -> float:
        least_s = _LEAST_SEQUENCE * self.decode.base_s
        return self.decode.unit_s if self.decode.unit_s > least_s else least_s


def _batches_s(rate: StageRate, amount: float, largest: float) -> float:
    return rate.base_s * math.ceil(amount / largest) + rate.unit_s * amount if amount > 0 else 0.0


class Work(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Work of requests at one instance.

    Attributes:
        num_pixels: pixels to encode.
        num_tokens: prompt tokens to compute.
        num_sequences: sequences to decode, running ones included.
        num_kv_tokens: tokens that need KV blocks.
    """

    num_pixels: float = 0
    num_tokens: float = 0
    num_sequences: float = 0
    num_kv_tokens: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            num_pixels=self.num_pixels + other.num_pixels,
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            num_kv_tokens=self.num_kv_tokens + other.num_kv_tokens,
        )

    def __sub__(self, other: Work) -> Work:
        """Return the difference, clipped at 0, as work is estimated."""
        num_pixels = self.num_pixels - other.num_pixels
        num_tokens = self.num_tokens - other.num_tokens
        num_sequences = self.num_sequences - other.num_sequences
        num_kv_tokens = self.num_kv_tokens - other.num_kv_tokens
        return Work(
            num_pixels=num_pixels if num_pixels > 0 else 0,
            num_tokens=num_tokens if num_tokens > 0 else 0,
            num_sequences=num_sequences if num_sequences > 0 else 0,
            num_kv_tokens=num_kv_tokens if num_kv_tokens > 0 else 0,
        )


NONE = Work()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The host and device of an instance. Unknown hosts ("") count as different."""

    host_id: str = ""
    device: str = ""


UNKNOWN = Place()


class Link(msgspec.Struct, frozen=True, kw_only=True):
    handshake_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.handshake_s + nbytes / self.bytes_per_s


#: Typical of one device's memory, shared memory of a host, and a 10 Gbit/s network.
SAME_DEVICE = Link(handshake_s=1e-4, bytes_per_s=2e10)
SAME_HOST = Link(handshake_s=3e-4, bytes_per_s=4e9)
NETWORK = Link(handshake_s=1e-3, bytes_per_s=1e9)


def link_between(one: Place, other: Place) -> Link:
    if not one.host_id or one.host_id != other.host_id:
        return NETWORK
    return SAME_DEVICE if one.device == other.device else SAME_HOST
