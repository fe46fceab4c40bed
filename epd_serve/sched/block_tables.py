"""Block tables of sequences: allocation, growth, forks and preemption."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from itertools import chain
from typing import Any, Protocol

from epd_serve.cache.block_pool import BlockPool, num_blocks_for
from epd_serve.errors import InvalidRequest
from epd_serve.sched.sequence import Sequence


class BlockMemory(Protocol):
    """The KV behind the blocks (:class:`~epd_serve.engine.kv_memory.KVMemory`)."""

    def copy_block(self, source: int, target: int) -> None: ...

    def save(self, blocks: AbstractSequence[int]) -> Any:
        """Return a copy of the blocks in other memory."""

    def restore(self, saved: Any, first: int, blocks: AbstractSequence[int]) -> None:
        """Copy saved blocks, from index ``first`` on, into these blocks."""


class BlockTables:
    """Moves blocks between a pool and sequences. Callers first check that enough are free."""

    def __init__(self, pool: BlockPool, memory: BlockMemory) -> None:
        self._pool = pool
        self._memory = memory
        self._num_looked_up = 0
        self._num_found = 0

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> None:
        """Raise InvalidRequest if the whole pool is too small for the request.

        Choices can run one after another, but each needs its first block at once.
        """
        needed = max(
            self._pool.num_missing(num_prompt_tokens, max_tokens),
            self._pool.num_missing(num_prompt_tokens, min(max_tokens, 1), num_sequences),
        )
        if needed > self._pool.capacity:
            raise InvalidRequest(
                f"the request needs {needed} KV blocks of {self._pool.block_size} tokens, but the instance has "
                f"{self._pool.capacity}; use fewer max_tokens, a shorter prompt or a smaller n",
                param="max_tokens",
            )

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def num_cached(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a sequence without blocks the prefix cache holds."""
        return len(self._pool.match(sequence.reusable_hashes(self._pool.block_size))) * self._pool.block_size

    def num_needed(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence needs to be admitted or, if it has some, to continue."""
        if blocks := sequence.blocks:
            # num_tokens inlined, as this runs for each sequence in each step
            if len(sequence.prompt_ids) + len(sequence.output_ids) <= len(blocks) * self._pool.block_size:
                return 0
            # it was admitted with room for one more token, so it may have a spare block
            return max(num_blocks_for(sequence.num_tokens, self._pool.block_size) - len(blocks), 0)
        return self._pool.num_missing(*self._demand(sequence))

    def num_freed(self, sequence: Sequence) -> int:
        """Return the least number of blocks that the pool regains when the sequence is preempted."""
        return self._pool.num_owned([*sequence.blocks, *chain(*sequence.forks, *sequence.states)])

    def admit(self, sequence: Sequence) -> None:
        """Allocate blocks for a sequence's known tokens and the next one; restore its saved KV."""
        taken = self._pool.allocate_request(*self._demand(sequence))
        sequence.blocks, sequence.forks, sequence.states = taken.root, taken.forks, taken.states
        sequence.num_registered = taken.num_cached
        if sequence.saved is None:
            sequence.num_computed = taken.num_cached * self._pool.block_size
            self._num_looked_up += 0 if self._pool.state_blocks else sequence.num_tokens
            self._num_found += sequence.num_computed
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            return
        end = num_blocks_for(sequence.num_computed, self._pool.block_size)
        if taken.num_cached < end:
            lacking = sequence.blocks[taken.num_cached : end] + sequence.state_blocks
            self._memory.restore(sequence.saved, taken.num_cached, lacking)
        sequence.saved = None
        self.register(sequence)

    def _demand(self, sequence: Sequence) -> tuple[int, int, int, list[bytes]]:
        """Return the arguments of :meth:`BlockPool.allocate_request` for a sequence without blocks."""
        num_more = 0 if sequence.hand_off or not sequence.max_tokens else 1  # more when it grows
        hashes = sequence.reusable_hashes(self._pool.block_size)
        return sequence.num_tokens, num_more, sequence.num_forked, hashes

    def prefix_lookups(self) -> tuple[int, int]:
        """Return the prompt tokens looked up in the prefix cache so far, and those found."""
        return self._num_looked_up, self._num_found

    def grow(self, sequence: Sequence) -> bool:
        """Allocate the block of a sequence's newest token if needed; return False if none is free."""
        needed = self.num_needed(sequence)
        if needed > self._pool.num_free:
            return False
        if needed:
            sequence.blocks += self._pool.allocate(needed)
        return True

    def fork(self, root: Sequence) -> list[Sequence]:
        """Return the choices of a computed prompt: full blocks shared, the partial block and the state copied."""
        shared, num_behind = divmod(root.num_prompt_tokens, self._pool.block_size)
        choices = [root]
        if num_behind:
            for own in root.forks:  # may fail, so before any block is acquired
                self._memory.copy_block(root.blocks[shared], own[0])
        for state in root.states[1:]:
            for source, target in zip(root.state_blocks, state, strict=True):
                self._memory.copy_block(source, target)
        for index, own in enumerate(root.forks, start=1):
            self._pool.acquire(root.blocks[:shared])
            choices.append(root.fork(index, root.blocks[:shared] + own))
        root.forks, root.states = [], root.states[:1]
        return choices

    def register(self, sequence: Sequence) -> None:
        """Add the prompt's computed blocks to the prefix cache."""
        computed = min(sequence.num_computed // self._pool.block_size, len(sequence.block_hashes))
        for i in range(sequence.num_registered, computed):
            self._pool.register(sequence.blocks[i], sequence.block_hashes[i])
        sequence.num_registered = max(sequence.num_registered, computed)

    def preempt(self, sequence: Sequence) -> None:
        """Release a sequence's blocks and save KV that cannot be recomputed."""
        # features are held only until the first token
        if not sequence.output_ids or (sequence.positions is not None and not sequence.spans):
            sequence.num_computed = 0
        else:
            end = num_blocks_for(sequence.num_computed, self._pool.block_size)
            sequence.saved = self._memory.save(sequence.blocks[:end] + sequence.state_blocks)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        self.give_back(sequence.blocks, sequence.forks, sequence.states)
        sequence.blocks, sequence.forks, sequence.states = [], [], []

    def give_back(self, blocks: list[int], forks: list[list[int]], states: list[list[int]]) -> None:
        """Release the blocks of a sequence or of an unused reservation."""
        for state in states:
            for block in state:
                self._memory.copy_block(0, block)  # half of a state's word, read as K or V, may be NaN
        self._pool.release([*blocks, *chain(*forks, *states)])
