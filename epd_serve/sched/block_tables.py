"""The blocks of sequences: taken at admission, one more now and then, forked, saved when others need them."""

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
        """Return the contents of blocks, copied to memory elsewhere."""

    def restore(self, saved: Any, first: int, blocks: AbstractSequence[int]) -> None:
        """Copy what :meth:`save` returned, from its block ``first`` on, into these blocks."""


class BlockTables:
    """Moves blocks between a pool and sequences. The callers check before each call that there is room."""

    def __init__(self, pool: BlockPool, memory: BlockMemory) -> None:
        self._pool = pool
        self._memory = memory
        self._num_looked_up = 0
        self._num_found = 0

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, num_sequences: int) -> None:
        """Raise InvalidRequest for a request that could not come to its end if it had all of the pool.

        Its choices can wait for each other, but each needs its first block at once.
        """
        needed = max(
            self._pool.num_missing(num_prompt_tokens, max_tokens),
            self._pool.num_missing(num_prompt_tokens, min(max_tokens, 1), num_sequences),
        )
        if needed > self._pool.capacity:
            raise InvalidRequest(
                f"the request needs {needed} KV blocks of {self._pool.block_size} tokens and the instance has "
                f"{self._pool.capacity}; ask for fewer max_tokens, a shorter prompt or a smaller n",
                param="max_tokens",
            )

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def num_cached(self, sequence: Sequence) -> int:
        """Leading tokens that a sequence without blocks would find computed."""
        return len(self._pool.match(sequence.reusable_hashes(self._pool.block_size))) * self._pool.block_size

    def num_needed(self, sequence: Sequence) -> int:
        """Blocks that a sequence takes from the pool to be admitted, or, where it has some, to go on."""
        if blocks := sequence.blocks:
            # num_tokens, asked of each sequence in each step
            if len(sequence.prompt_ids) + len(sequence.output_ids) <= len(blocks) * self._pool.block_size:
                return 0
            # admitted with room for one more token, it may have a block to spare
            return max(num_blocks_for(sequence.num_tokens, self._pool.block_size) - len(blocks), 0)
        return self._pool.num_missing(*self._demand(sequence))

    def num_freed(self, sequence: Sequence) -> int:
        """The least number of blocks that the pool gets back when the sequence loses its own."""
        return self._pool.num_owned([*sequence.blocks, *chain(*sequence.forks, *sequence.states)])

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence the blocks of its known tokens and the next one; bring back what was saved of it."""
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
        """The arguments of :meth:`BlockPool.allocate_request` for a sequence without blocks."""
        num_more = 0 if sequence.hand_off or not sequence.max_tokens else 1  # for the others it grows
        hashes = sequence.reusable_hashes(self._pool.block_size)
        return sequence.num_tokens, num_more, sequence.num_forked, hashes

    def prefix_lookups(self) -> tuple[int, int]:
        """Tokens of prompts looked up among the cached prefixes so far, and tokens found there."""
        return self._num_looked_up, self._num_found

    def grow(self, sequence: Sequence) -> bool:
        """Let a sequence have a block for its newest token; False: there is none."""
        needed = self.num_needed(sequence)
        if needed > self._pool.num_free:
            return False
        if needed:
            sequence.blocks += self._pool.allocate(needed)
        return True

    def fork(self, root: Sequence) -> list[Sequence]:
        """All choices of a computed prompt: full blocks shared, the last partial one and the state copied."""
        shared, num_behind = divmod(root.num_prompt_tokens, self._pool.block_size)
        choices = [root]
        if num_behind:
            for own in root.forks:  # before anything is taken: it may fail
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
        """Make the prompt's computed blocks findable."""
        computed = min(sequence.num_computed // self._pool.block_size, len(sequence.block_hashes))
        for i in range(sequence.num_registered, computed):
            self._pool.register(sequence.blocks[i], sequence.block_hashes[i])
        sequence.num_registered = max(sequence.num_registered, computed)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; KV that cannot be computed again is saved."""
        # features are held until the first token only
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
        """Release what a sequence has, or what was reserved for one that never came."""
        for state in states:
            for block in state:
                self._memory.copy_block(0, block)  # as K and V half of a state's word may be no number
        self._pool.release([*blocks, *chain(*forks, *states)])
