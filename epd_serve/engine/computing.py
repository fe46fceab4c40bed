"""What computes an engine's steps, as protocols without torch, and what comes out of a step."""

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

#: Stands for a token where the logits are no numbers, and none can be chosen.
NO_TOKEN = -1
#: The token of a sequence whose request forbids every token.
ALL_FORBIDDEN = -2


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: TokenLogprob | None = None


#: The tokens of a step: the next one of each sequence, or the ``n`` first ones of one whose prompt ended in it.
SampledTokens = list[tuple[Sequence, list[SampledToken]]]


class LaunchedStep(Protocol):
    """A step that the device computes: ``sample``, then ``read``."""

    def sample(self) -> None:
        """Let the device choose the tokens; those before them must be known."""
        ...

    def read(self) -> SampledTokens:
        """Wait for the end of the step."""
        ...


class Runner(Protocol):
    """Turns a schedule into a step of the language model."""

    def activate(self) -> None:
        """Make its device that of this thread, which is to launch steps."""
        ...

    def launch(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Any],
        on_layer: Callable[[int], None] | None = None,
        before: Any = None,
    ) -> LaunchedStep:
        """Let the device compute the scheduled tokens; does not wait for it.

        Args:
            features_by_hash: the features of all media that the chunks overlap.
            on_layer: called on this thread when the device's work so far puts a layer's KV into the cache.
            before: the step of this runner that chooses the tokens for which placeholders stand.
        """
        ...


class KVCacheMemory(BlockMemory, KVSource, Protocol):
    """The KV of an instance: blocks, where the model computes, and a slab by which peers reach them.

    Attributes:
        region: the slab, as peers name it. buffer: the same, here.
        staged_cells: the most layers × blocks that can be landed at once, where the slab is not the cache itself.
        num_staged: layers × blocks that are on their way through the slab.
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
        """Copy blocks of some layers on the device of ``region`` to blocks here. Blocks; raises TransferError."""
        ...

    def land(self, layers: range, blocks: AbstractSequence[int]) -> AbstractContextManager[ReadableKV]:
        """A context for writing blocks of some layers where its value says in the slab.

        At its end, unless that is an error, the model can read them. It may wait for others' to end.
        """
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books of the slab balance."""
        ...
