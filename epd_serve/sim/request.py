"""The requests of simulated clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SimRequest:
    """One request.

    Attributes:
        at_s: when it is sent.
        images: (name, pixels) of each; equal names are the same image.
        num_text_tokens: of the prompt, images apart.
        num_output_tokens: that it gets.
        prefix: names of the prompt's leading parts of ``prefix_tokens`` tokens each, for prefix reuse.
        max_tokens: as the client gave it to the gateway; None: open-ended.
    """

    at_s: float
    num_text_tokens: int
    num_output_tokens: int
    images: tuple[tuple[str, int], ...] = ()
    prefix: tuple[int, ...] = ()
    prefix_tokens: int = 512
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_text_tokens < 1 or self.num_output_tokens < 1 or self.at_s < 0:
            raise ValueError(f"{self}: a request has a prompt, an answer and a time of 0 or later")

    @property
    def modality(self) -> str:
        return "image" if self.images else "text"

    @property
    def num_pixels(self) -> int:
        return sum(pixels for _, pixels in self.images)
