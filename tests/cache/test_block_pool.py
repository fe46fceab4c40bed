"""The block pool as a state machine: nothing is lost, nothing is given twice, hashes find what they name."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from epd_serve.cache.block_pool import BlockPool, RequestBlocks, hash_blocks
from epd_serve.types import MediaSpan

BLOCK_SIZE = 4
IDLE_REQUESTS = 2


def touched(pool: BlockPool) -> int:
    """Blocks that were ever held: those whose memory is in use on a host that gives it at the first write."""
    return pool._untouched - 1


class BlockPoolMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24, BLOCK_SIZE, IDLE_REQUESTS)
        self.live: dict[int, RequestBlocks] = {}
        self.next_id = 0
        self.num_requests = 0
        self.released: list[tuple[int, list[int]]] = []

    @rule(
        target=requests,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(0, 12),
        num_sequences=st.integers(1, 3),
    )
    def allocate(self, prompt: list[int], max_tokens: int, num_sequences: int) -> int:
        hashes = hash_blocks(prompt, BLOCK_SIZE)
        key = self.next_id
        self.next_id += 1
        num_free = self.pool.num_free
        missing = self.pool.num_missing(len(prompt), max_tokens, num_sequences, hashes)
        if missing > num_free:
            return key
        expected_cached = len(self.pool.match(hashes[: (len(prompt) - 1) // BLOCK_SIZE]))
        num_touched = touched(self.pool)
        blocks = self.pool.allocate_request(len(prompt), max_tokens, num_sequences, hashes)
        self.num_requests += 1
        assert self.pool.num_free == num_free - missing
        assert blocks.num_cached == expected_cached
        assert len(blocks.root) == -(-(len(prompt) + max_tokens) // BLOCK_SIZE)
        assert len(blocks.forks) == num_sequences - 1
        owned = [b for other in self.live.values() for b in other.all()]
        assert not set(blocks.root[blocks.num_cached :]) & set(owned), "a held block was handed out again"
        for block, digest in zip(blocks.root, hashes, strict=False):
            self.pool.register(block, digest)
        self.live[key] = blocks
        if touched(self.pool) > num_touched:
            held = {block for other in self.live.values() for block in other.all()}
            recent = {b for when, old in self.released if self.num_requests - when <= IDLE_REQUESTS for b in old}
            assert touched(self.pool) <= len(held | recent), (
                "fresh memory was touched beside memory in nobody's use"
            )
        return key

    @rule(key=consumes(requests))
    def release(self, key: int) -> None:
        if key in self.live:
            blocks = self.live.pop(key).all()
            num_free, owned = self.pool.num_free, self.pool.num_owned(blocks)
            self.pool.release(blocks)
            self.released.append((self.num_requests, blocks))
            assert self.pool.num_free == num_free + owned

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def forget(self, prompt: list[int]) -> None:
        hashes, num_free = hash_blocks(prompt, BLOCK_SIZE), self.pool.num_free
        self.pool.forget(hashes)
        assert self.pool.match(hashes) == [] and self.pool.num_free == num_free

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity()
        held = {block for blocks in self.live.values() for block in blocks.all()}
        assert self.pool.num_free == self.pool.capacity - len(held)


TestBlockPool = BlockPoolMachine.TestCase


def serve(pool: BlockPool, tokens: list[int]) -> int:
    """Runs one prompt alone; returns how many of its blocks were cached."""
    hashes = hash_blocks(tokens, pool.block_size)
    blocks = pool.allocate_request(len(tokens) + 1, 0, 1, hashes)
    for block, digest in zip(blocks.root, hashes, strict=False):
        pool.register(block, digest)
    pool.release(blocks.all())
    return blocks.num_cached


def test_memory_that_no_load_needs_is_never_touched() -> None:
    pool = BlockPool(100_000, BLOCK_SIZE, 32)
    counts = []
    for number in range(400):  # prompts without a common prefix, 3 blocks each
        assert serve(pool, list(range(1000 * number, 1000 * number + 11))) == 0
        counts.append(touched(pool))
    assert counts[50] == counts[-1] <= 3 * 35


def test_a_prefix_outlives_other_requests_while_memory_is_fresh() -> None:
    pool = BlockPool(100_000, BLOCK_SIZE, 32)
    conversation = list(range(16))
    serve(pool, conversation)
    for number in range(1, 31):
        serve(pool, list(range(1000 * number, 1000 * number + 11)))
    assert serve(pool, conversation) == 4


def test_a_full_pool_gives_what_was_released_longest_ago() -> None:
    pool = BlockPool(7, BLOCK_SIZE, 1000)
    first, second, third = ([number] * 8 for number in range(3))
    serve(pool, first)
    serve(pool, second)
    assert touched(pool) == 5
    assert serve(pool, first) == 2
    serve(pool, third)
    assert serve(pool, first) == 2
    assert len(pool.match(hash_blocks(second, BLOCK_SIZE))) < 2


def test_hashes_tell_images_apart_and_chain() -> None:
    tokens = [7] * 12
    one = hash_blocks(tokens, 4, [MediaSpan(2, 6, "a" * 64)])
    two = hash_blocks(tokens, 4, [MediaSpan(2, 6, "b" * 64)])
    plain = hash_blocks(tokens, 4)
    assert len({*one, *two, *plain}) == 9, "blocks behind a difference must differ too"
    assert hash_blocks(tokens[:8], 4, [MediaSpan(2, 6, "a" * 64)]) == one[:2]
    shifted = hash_blocks(tokens, 4, [MediaSpan(3, 6, "a" * 64)])
    assert shifted[0] != one[0], "another part of the same image"
    in_two = [
        hash_blocks(tokens, 4, [MediaSpan(0, 4, "a" * 64), MediaSpan(5, 4, "a" * 64, row)]) for row in (4, 5)
    ]
    assert in_two[0][0] == in_two[1][0], "a run of the same rows"
    assert in_two[0][1] != in_two[1][1], "another part of the same image, in a run of its own"


def test_prompts_of_another_salt_share_no_block() -> None:
    tokens = list(range(12))
    plain, one, two = (hash_blocks(tokens, 4, salt=salt) for salt in ("", "a", "b"))
    assert plain == hash_blocks(tokens, 4) and one == hash_blocks(tokens, 4, salt="a")
    assert not set(plain) & set(one) and not set(one) & set(two)
