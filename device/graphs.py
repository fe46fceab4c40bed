"""The graph runner of devices that capture nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor


class EagerRunner:
    """Fills the GraphRunner protocol by calling the step: the same contract, nothing saved."""

    name = "eager"
    captures = False

    def __init__(self) -> None:
        self._steps: dict[int, Callable[[], Tensor]] = {}

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        self._steps[size] = step

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        check_update(size, decode_context_lens, self._steps)

    def replay(self, size: int) -> Tensor:
        return self._steps[size]()


def check_update(size: int, decode_context_lens: Sequence[int], captured: Mapping[int, object]) -> None:
    """Raises KeyError for a size that was not captured, ValueError for another number of lengths."""
    if size not in captured:
        raise KeyError(size)
    if len(decode_context_lens) != size:
        raise ValueError(
            f"{len(decode_context_lens)} context lengths for a graph of {size} sequences; pad them to {size}"
        )
