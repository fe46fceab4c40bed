"""The blocks of a paged KV cache: reference counts, prefix reuse by content hash, LRU eviction."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from epd_serve.types import MediaSpan

#: Keep an unused cached prefix for this many requests before evicting it in favour of untouched memory.
IDLE_REQUESTS = 256


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@dataclass(slots=True, kw_only=True)
class RequestBlocks:
    """The first blocks of a request; its sequences take more as they decode.

    Attributes:
        root: block table of the first sequence.
        forks: for each further sequence (``n`` > 1), its own blocks from the first one not full of prompt.
        states: for each sequence the blocks of its recurrent state; empty if the model has none.
        num_cached: leading root blocks found in the prefix cache.
    """

    root: list[int]
    forks: list[list[int]] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)
    num_cached: int = 0

    def all(self) -> list[int]:
        return self.root + [block for own in (*self.forks, *self.states) for block in own]

    def written(self, num_blocks: int) -> list[int]:
        """Return the blocks of a computed prompt of ``num_blocks``: its KV, then its state."""
        return self.root[:num_blocks] + (self.states[0] if self.states else [])


class BlockPool:
    """Blocks ``1 .. num_blocks - 1``; block 0 is scratch for padding and never allocated.

    A released block keeps its content and hash until it is allocated again. The order of allocation avoids
    touching unneeded memory:

    1. blocks without a hash that were used before, last released first;
    2. cached blocks released more than ``idle_requests`` requests ago, oldest first;
    3. blocks never used, in ascending order;
    4. the other cached blocks, least recently released first.

    So the next ``idle_requests`` requests find a prefix again if the pool is large enough, and a load without
    common prefixes touches only the memory of these and the running requests. A smaller pool is a plain LRU cache.

    Args:
        state_blocks: additional blocks of a sequence, for its recurrent state.

    Attributes:
        num_free: blocks without a reference, cached ones included.
        capacity: ``num_free`` of an idle pool.
    """

    def __init__(
        self, num_blocks: int, block_size: int, idle_requests: int = IDLE_REQUESTS, *, state_blocks: int = 0
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 2, as the first block holds no KV")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.idle_requests = idle_requests
        self.state_blocks = state_blocks
        self.capacity = self.num_free = num_blocks - 1
        self._refs = [0] * num_blocks
        self._blank: list[int] = []
        self._cached: OrderedDict[int, int] = OrderedDict()  # block → num_requests at its release
        self._untouched = 1  # the first block never used
        self._num_requests = 0
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``hashes``. Changes nothing."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_missing(
        self, num_tokens: int, num_more: int, num_sequences: int = 1, hashes: Sequence[bytes] = ()
    ) -> int:
        """Return the free blocks that :meth:`allocate_request` would take now."""
        total = num_blocks_for(num_tokens + num_more, self.block_size)
        own = total - num_tokens // self.block_size
        matched = self.match(hashes[: (num_tokens - 1) // self.block_size])
        shared = sum(1 for block in matched if self._refs[block])
        return total + (num_sequences - 1) * own + num_sequences * self.state_blocks - shared

    def allocate_request(
        self, num_tokens: int, num_more: int, num_sequences: int = 1, hashes: Sequence[bytes] = ()
    ) -> RequestBlocks:
        """Allocate blocks for known tokens and the next ``num_more``, reusing the longest cached prefix.

        Precondition: :meth:`num_missing` is at most ``num_free``. The last known token is never taken from the
        cache, as its logits are needed.
        """
        self._num_requests += 1
        root = self.match(hashes[: (num_tokens - 1) // self.block_size])
        num_cached = len(root)
        if root:
            self.acquire(root)
        total = num_blocks_for(num_tokens + num_more, self.block_size)
        root = root + self.allocate(total - num_cached)
        own = total - num_tokens // self.block_size
        forks = [self.allocate(own) for _ in range(num_sequences - 1)]
        states = [self.allocate(self.state_blocks) for _ in range(num_sequences)] if self.state_blocks else []
        return RequestBlocks(root=root, forks=forks, states=states, num_cached=num_cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks with one reference each. Precondition: ``count <= num_free``."""
        assert count <= self.num_free, f"{count} blocks requested of {self.num_free} free"
        self.num_free -= count
        blocks: list[int] = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            elif self._untouched < self.num_blocks and not (
                self._cached and self._num_requests - next(iter(self._cached.values())) > self.idle_requests
            ):
                block = self._untouched
                self._untouched += 1
            else:
                block, _released = self._cached.popitem(last=False)
                del self._by_hash[self._hash_of.pop(block)]
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks in use or found by :meth:`match`."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
                self.num_free -= 1
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to the blocks; the tail of a prefix becomes evictable before its head."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released more often than acquired"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self.num_free += 1
                if block in self._hash_of:
                    self._cached[block] = self._num_requests
                else:
                    self._blank.append(block)

    def num_owned(self, blocks: Sequence[int]) -> int:
        """Return how many blocks would become free if released."""
        return sum(1 for block in blocks if self._refs[block] == 1)

    def register(self, block: int, digest: bytes) -> None:
        """Add a block in use to the prefix cache, unless another block has this hash.

        With recurrent states nothing is cached, as the KV of a prefix is useless without the state after it.
        """
        assert self._refs[block] > 0, f"block {block} is not held"
        if not self.state_blocks and digest not in self._by_hash and block not in self._hash_of:
            self._by_hash[digest] = block
            self._hash_of[block] = digest

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove blocks whose contents may be wrong from the prefix cache."""
        for digest in hashes:
            block = self._by_hash.pop(digest, None)
            if block is not None:
                del self._hash_of[block]
                if block in self._cached:
                    del self._cached[block]
                    self._blank.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is exactly one of: in use, cached, blank, untouched."""
        free = {*self._blank, *self._cached, *range(self._untouched, self.num_blocks)}
        assert len(free) == self.num_free, "a block is free twice"
        assert 0 not in free and self._refs[0] == 0, "the scratch block was allocated"
        for block in range(1, self.num_blocks):
            assert (self._refs[block] == 0) == (block in free), f"block {block}: {self._refs[block]} references"
        assert {d: b for b, d in self._hash_of.items()} == self._by_hash, "hash tables disagree"
        assert all(block in self._hash_of for block in self._cached), "a cached block lacks a hash"
        assert not any(block in self._hash_of for block in self._blank), "a blank block has a hash"


_ROOT = b"epd-serve kv block 1"


def hash_blocks(
    token_ids: Sequence[int], block_size: int, spans: Sequence[MediaSpan] = (), salt: str = ""
) -> list[bytes]:
    """Hash each *full* block of a prompt, chained to its predecessors.

    Placeholder tokens are equal for all images, so a block that overlaps a span also hashes the span's mm_hash and
    the row of its feature at which the block begins. A ``salt`` enters the first block, and so all.
    """
    hashes: list[bytes] = []
    ahead = sorted(spans, key=lambda span: -span.start)
    parent = blake3(_ROOT + salt.encode("utf-8", "surrogatepass")).digest() if salt else _ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        hasher = blake3(parent)
        hasher.update(array("q", token_ids[start:end]).tobytes())
        while ahead and ahead[-1].end <= start:
            ahead.pop()
        for span in reversed(ahead):
            if span.start >= end:
                break
            row = start - span.start + span.offset
            hasher.update(span.mm_hash.encode() + row.to_bytes(8, "little", signed=True))
        parent = hasher.digest()
        hashes.append(parent)
    return hashes
