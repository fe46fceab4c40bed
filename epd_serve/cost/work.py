"""Amounts of work, counted in pixels, tokens and sequences, before a cost model turns them into seconds."""

from __future__ import annotations

import msgspec


class Work(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Work of some requests at one instance.

    Attributes:
        num_pixels: pixels to be encoded.
        num_tokens: prompt tokens to be computed.
        num_sequences: sequences that are, or will be, decoded.
        num_kv_tokens: tokens whose KV has no room yet.
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
        """The work that is left, nothing below zero: estimates may take away more than there was."""
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
