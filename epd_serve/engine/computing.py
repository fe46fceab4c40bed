"""Torch-free protocols of the parts that compute steps, and the result of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from epd_serve.protocol.wire import KVLayout, Region, TokenLogprob
from epd_serve.sched.block_tables import BlockMemory
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.kv_sender import KVSource, ReadableKV

#: Placeholder for a token that cannot be chosen because the logits are NaN.
NO_TOKEN = -1
#: Placeholder for the token of a sequence whose request forbids every token.
ALL_FORBIDDEN = -2


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: TokenLogprob | None = None


#: The tokens of a step: one per sequence, or the first tokens of all ``n`` choices after a prompt's last chunk.
SampledTokens = list[tuple[Sequence, list[SampledToken]]]


class LaunchedStep(Protocol):
    """A step on the device. Call ``sample``, then ``read``."""

    def sample(self) -> None:
        """Launch the choice of tokens; all earlier tokens must be known."""
        ...

    def read(self) -> SampledTokens:
        """Wait for the step and return its tokens."""
        ...


class Runner(Protocol):
    """Turns a schedule into a step of the language model."""

    def activate(self) -> None:
        """Make its device current for this thread, which will launch steps."""
        ...

    def launch(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Any],
        on_layer: Callable[[int], None] | None = None,
        before: Any = None,
    ) -> LaunchedStep:
        """Launch the computation of the scheduled tokens without waiting for it.

        Args:
            features_by_hash: features of all media that overlap the chunks.
            on_layer: called on this thread once the work that writes a layer's KV is launched.
            before: the step whose tokens replace the placeholders.
        """
        ...


class KVCacheMemory(BlockMemory, KVSource, Protocol):
    """The KV of an instance: the model's blocks, and the slab through which peers access them.

    Attributes:
        region: the slab's address for peers. buffer: the slab in this process.
        staged_cells: maximum layers × blocks to land at once, if the slab is not the cache itself.
        num_staged: layers × blocks in transit through the slab.
    """

    layout: KVLayout
    num_blocks: int

    @property
    def num_staged(self) -> int: ...

    def maps(self, region: Region) -> bool:
        """Return whether :meth:`read_mapped` reaches the device's memory of ``region``. Blocks."""
        ...

    def read_mapped(
        self, region: Region, layers: range, source: AbstractSequence[int], blocks: AbstractSequence[int]
    ) -> None:
        """Copy some layers of ``source`` blocks on ``region``'s device to ``blocks``. Blocks.

        Raises TransferError.
        """
        ...

    def land(self, layers: range, blocks: AbstractSequence[int]) -> AbstractContextManager[ReadableKV]:
        """Yield the places in the slab to write blocks of some layers to. May wait for free cells.

        The model can read the blocks after the context ends without an error.
        """
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless the slab's accounting balances."""
        ...
