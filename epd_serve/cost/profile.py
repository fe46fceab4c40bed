"""Times of a model's stages on a device: closed forms in versioned JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal, Self

import msgspec

#: Of the file's form. A file of another version is measured again.
VERSION = 1


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a step as a sum over its work; a profile's step takes the largest of its lines.

    Units are those of :class:`~epd_serve.sched.step_cost.StepWork`, whose ``prefill_pairs`` are a chunk's tokens
    times the tokens up to its end.
    """

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
    """Seconds of a step of nothing but ``num_sequences`` decodes: a base, and for each token of all contexts."""

    num_sequences: int
    base_s: float = 0.0
    context_s: float = 0.0


class EncodeLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a batch of images as a sum over them; ``pair_s`` is for each image's squared number of pixels."""

    base_s: float = 0.0
    image_s: float = 0.0
    pixel_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, pixels: Sequence[int]) -> float:
        squares = sum(count * count for count in pixels) if self.pair_s else 0.0
        return self.base_s + self.image_s * len(pixels) + self.pixel_s * sum(pixels) + self.pair_s * squares


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """The relative errors of a fit against the measurements."""

    num_samples: int
    median: float
    p90: float
    worst: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One model on one device (``tensor_parallel`` of them together).

    Attributes:
        kind: "measured" on the device, or "analytic" from its data sheet.
        software: versions by name, at the measurement.
        threads: number of threads that compute, on a CPU.
        step, encode: lines of which the largest decides; for analytic profiles (compute, memory).
        decode: lines of steps of decodes alone, sizes rising; without any, ``step`` is used. The time of a step is
            not linear in their number: the first ones cost most.
        compute_share, bandwidth_share: part of the device's peak that a step uses while it waits for it.
        memory_bytes: memory for weights and KV; language_bytes, tower_bytes: sizes of the weights.
        state_bytes: of a sequence's recurrent state. num_layers: those that keep KV.
        pixels_per_token: for images whose tokens go by their size; tokens_per_image: for towers with one size.
        min_pixels, max_pixels: bounds to which the model's processor resizes every image.
        link_bytes_per_s: bandwidth to other devices of the machine; handshake_s: time before each transfer.
        request_s: time of a request on its way to the engine and back: gateway, HTTP, tokenising.
        residuals: errors of the fits, by stage.
        samples: the measurements: stage, its work, seconds.
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
                f"a profile of version {self.version}, and this program reads {VERSION}: make it anew"
            )
        if not self.step:
            raise ValueError("a profile needs the time of a step")

    def step_s(self, num_tokens: float, num_sequences: float, context: float = 0, pairs: float = 0) -> float:
        """Seconds of one step of the language model."""
        lines = self.step if pairs else self.decode_lines(num_sequences)
        return max([line.seconds(num_tokens, num_sequences, context, pairs) for line in lines])

    def decode_lines(self, num_sequences: float) -> tuple[Line, ...]:
        """The lines for steps of ``num_sequences`` decodes and nothing else.

        Between two measured sizes they lie on the straight line; beyond the largest size they continue the last
        one, but are never faster than what was measured.
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
        """Seconds of one batch of images, given by their pixels. Raises ValueError without a tower."""
        if not self.encode:
            raise ValueError(f"the profile of {self.model} on {self.device} has no encode")
        seen = self.seen(pixels)
        return max(line.seconds(seen) for line in self.encode)

    def seen(self, pixels: Sequence[int]) -> list[int]:
        """The pixels that the tower sees of images, once the processor has resized them."""
        return [min(max(count, self.min_pixels), self.max_pixels) for count in pixels]

    def image_tokens(self, num_pixels: int) -> int:
        """The number of prompt tokens that one image takes."""
        return self.tokens_per_image or max(round(self.seen([num_pixels])[0] / self.pixels_per_token), 1)

    def num_blocks(self, block_size: int, *, share: float, holds_tower: bool) -> int:
        """KV blocks that a ``share`` of the memory has room for besides the weights; 2 at least."""
        free = self.memory_bytes * share - self.language_bytes - (self.tower_bytes if holds_tower else 0)
        return max(int(free / (self.kv_token_bytes * block_size)), 2)

    def state_blocks(self, block_size: int) -> int:
        """KV blocks that the recurrent state of one sequence takes."""
        return -(-self.state_bytes // (self.kv_token_bytes * block_size)) if self.state_bytes else 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError that names the file and what is wrong with it."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"profile {path}: {reason}; 'epd-serve profile' makes one") from error

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"
