"""Times of a model's stages on a device, as closed forms in versioned JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal, Self

import msgspec

from device.emulated.timeline import UNKNOWN, Demand

#: Version of the file format.
VERSION = 1


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Linear model of a step's seconds, in the units of :class:`~epd_serve.sched.step_cost.StepWork`."""

    base_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, num_tokens: float, num_sequences: float, context: float, pairs: float) -> float:
        return (
            self.base_s
            + self.token_s * num_tokens
            + self.sequence_s * num_sequences
            + self.context_s * context
            + self.pair_s * pairs
        )


class DecodeLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a step of ``num_sequences`` decodes alone: a base, and a part for each token of all contexts."""

    num_sequences: int
    base_s: float = 0.0
    context_s: float = 0.0


class EncodeLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a batch of images; ``pair_s`` is the coefficient of squared pixels."""

    base_s: float = 0.0
    image_s: float = 0.0
    pixel_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, pixels: Sequence[int]) -> float:
        squares = sum(count * count for count in pixels) if self.pair_s else 0.0
        return self.base_s + self.image_s * len(pixels) + self.pixel_s * sum(pixels) + self.pair_s * squares


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """The relative errors of a fit."""

    num_samples: int
    median: float
    p90: float
    worst: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The times of one model on one device, or on ``tensor_parallel`` devices.

    Attributes:
        kind: "measured" on the device, or "analytic" from its data sheet.
        step, encode: the largest line is the time; (compute, memory) in analytic profiles.
        decode: lines of steps of decodes alone, by ascending size, as their time is not linear in the number; if
            empty, ``step`` is used.
        software: versions by name, at the measurement.
        threads: threads that compute, on a CPU.
        compute_share, bandwidth_share: share of the device's peak that a step reaches.
        memory_bytes: memory for weights and KV.
        language_bytes, tower_bytes: sizes of the weights.
        state_bytes: recurrent state of a sequence.
        num_layers: layers with KV.
        pixels_per_token, tokens_per_image: give the tokens of an image.
        min_pixels, max_pixels: bounds to which the processor resizes images.
        link_bytes_per_s: bandwidth to the other devices of the machine.
        handshake_s: time before each transfer.
        request_s: overhead of a request: gateway, HTTP, tokenising.
        residuals: errors of the fits, by stage.
        samples: measurements as (stage, work, seconds).
    """

    kind: Literal["measured", "analytic"]
    device: str
    model: str
    step: tuple[Line, ...]
    encode: tuple[EncodeLine, ...]
    decode: tuple[DecodeLine, ...] = ()
    version: int = VERSION
    description: str = ""
    software: dict[str, str] = {}
    tensor_parallel: int = 1
    threads: int = 1
    dtype: str = ""
    compute_share: float = 1.0
    bandwidth_share: float = 1.0
    memory_bytes: float = 0.0
    language_bytes: float = 0.0
    tower_bytes: float = 0.0
    kv_token_bytes: int = 0
    state_bytes: int = 0
    feature_token_bytes: int = 0
    num_layers: int = 1
    pixels_per_token: float = 784.0
    tokens_per_image: int | None = None
    min_pixels: int = 1
    max_pixels: int = 1 << 31
    link_bytes_per_s: float = 4e9
    handshake_s: float = 3e-4
    request_s: float = 0.0
    residuals: dict[str, Residual] = {}
    samples: list[tuple[str, list[float], float]] = []

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(
                f"the profile has version {self.version}, but this program reads {VERSION}: profile again"
            )
        if not self.step:
            raise ValueError("the profile lacks the time of a step")

    def __hash__(self) -> int:
        return hash((self.kind, self.device, self.model, self.tensor_parallel, self.dtype))

    def step_s(self, num_tokens: float, num_sequences: float, context: float = 0, pairs: float = 0) -> float:
        """Return the seconds of a language model step."""
        lines = self.step if pairs else self.decode_lines(num_sequences)
        return max([line.seconds(num_tokens, num_sequences, context, pairs) for line in lines])

    def step_demand(
        self, num_tokens: float, num_sequences: float, context: float, pairs: float
    ) -> tuple[float, Demand]:
        """Return the seconds of a step, and the share of the device that it uses."""
        lines = self.step if pairs else self.decode_lines(num_sequences)
        seconds = [line.seconds(num_tokens, num_sequences, context, pairs) for line in lines]
        return self._demand(seconds, self.step[0].base_s)

    def encode_demand(self, pixels: Sequence[int]) -> tuple[float, Demand]:
        """Return the seconds of a batch of images, and the share of the device that it uses.

        Raises ValueError without a tower.
        """
        if not self.encode:
            raise ValueError(f"the profile of {self.model} on {self.device} lacks the time of encodes")
        resized = self.resized(pixels)
        return self._demand([line.seconds(resized) for line in self.encode], self.encode[0].base_s)

    def _demand(self, seconds: Sequence[float], launch_s: float) -> tuple[float, Demand]:
        total_s = max(seconds)
        if self.kind != "analytic" or len(seconds) != 2:  # a measured line does not separate compute and memory
            return total_s, UNKNOWN
        compute, memory = ((one - launch_s) / total_s for one in seconds)
        return total_s, Demand(self.compute_share * compute, self.bandwidth_share * memory)

    def decode_lines(self, num_sequences: float) -> tuple[Line, ...]:
        """Return the lines of a step of ``num_sequences`` decodes alone.

        Interpolates between measured sizes; beyond the largest it extrapolates, but never below the largest.
        """
        if not self.decode:
            return self.step
        sizes = self.decode
        above = min(max(bisect_left(sizes, num_sequences, key=attrgetter("num_sequences")), 1), len(sizes) - 1)
        low, high = sizes[above - 1], sizes[above]
        if low.num_sequences >= high.num_sequences:  # one size
            return (Line(base_s=low.base_s, context_s=low.context_s),)
        part = max((num_sequences - low.num_sequences) / (high.num_sequences - low.num_sequences), 0.0)
        ends = ((low.base_s, high.base_s), (low.context_s, high.context_s))
        base_s, context_s = (a + (b - a) * part if part <= 1 else max(a + (b - a) * part, b) for a, b in ends)
        return (Line(base_s=base_s, context_s=context_s),)

    def encode_s(self, pixels: Sequence[int]) -> float:
        """Return the seconds of a batch of images, given by their pixels. Raises ValueError without a tower."""
        return self.encode_demand(pixels)[0]

    def resized(self, pixels: Sequence[int]) -> list[int]:
        """Return the pixels of images after the processor has resized them."""
        return [min(max(count, self.min_pixels), self.max_pixels) for count in pixels]

    def image_tokens(self, num_pixels: int) -> int:
        """Return the prompt tokens of an image."""
        return self.tokens_per_image or max(round(self.resized([num_pixels])[0] / self.pixels_per_token), 1)

    def num_blocks(self, block_size: int, *, share: float, holds_tower: bool) -> int:
        """Return the KV blocks that fit in a ``share`` of the memory next to the weights, at least 2."""
        free = self.memory_bytes * share - self.language_bytes - (self.tower_bytes if holds_tower else 0)
        return max(int(free / (self.kv_token_bytes * block_size)), 2)

    def state_blocks(self, block_size: int) -> int:
        """Return the KV blocks of a sequence's recurrent state."""
        return -(-self.state_bytes // (self.kv_token_bytes * block_size)) if self.state_bytes else 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises ValueError, which names the file and the fault."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"profile {path}: {reason}; make one with 'epd-serve profile'") from error

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
