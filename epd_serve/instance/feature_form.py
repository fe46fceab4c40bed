"""The form that a feature must have before a model may be given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd_serve.errors import InstanceFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureForm:
    """[number of placeholder tokens of the image, ``width``] of ``dtype``.

    Attributes:
        num_tokens: placeholder tokens of an image of (width, height) pixels.
    """

    dtype: str
    width: int
    num_tokens: Callable[[tuple[int, int]], int]

    def check(self, mm_hash: str, shape: Sequence[int], dtype: str, size: tuple[int, int]) -> None:
        """Raise InstanceFailed for a feature that is none of this model's for an image of ``size`` pixels."""
        expected = [self.num_tokens(size), self.width]
        if list(shape) != expected or dtype != self.dtype:
            raise InstanceFailed(
                f"feature {mm_hash[:12]} is {list(shape)} {dtype}; an image of {size[0]}x{size[1]} pixels "
                f"has {expected} {self.dtype} here"
            )
