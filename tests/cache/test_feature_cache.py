"""The feature cache as a state machine: bytes add up, held features stay, LRU decides the rest."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_serve.cache.feature_cache import FeatureCache

KEYS = st.sampled_from("abcdefgh")
OWNERS = st.sampled_from(["r1", "r2", "r3"])


class FeatureCacheMachine(RuleBasedStateMachine):
    max_idle: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.cache: FeatureCache[str] = FeatureCache(100, self.max_idle)
        self.holds: set[tuple[str, str]] = set()

    @rule(key=KEYS, owner=OWNERS, nbytes=st.integers(1, 60), beyond=st.booleans())
    def put(self, key: str, owner: str, nbytes: int, beyond: bool) -> None:
        if not beyond and key not in self.cache and not self.cache.can_put(nbytes):
            return
        for evicted in self.cache.put(key, f"value of {key}", nbytes, owner, beyond=beyond):
            assert not any(f"value of {held}" == evicted for _, held in self.holds), "a held feature was evicted"
        self.holds.add((owner, key))

    @rule(key=KEYS, owner=OWNERS)
    def acquire(self, key: str, owner: str) -> None:
        value = self.cache.acquire(key, owner)
        assert value in (None, f"value of {key}")
        if value is not None:
            self.holds.add((owner, key))

    @rule(owner=OWNERS, key=KEYS)
    def release_one(self, owner: str, key: str) -> None:
        self.cache.release(owner, key)
        self.holds.discard((owner, key))

    @rule(owner=OWNERS)
    def release_all(self, owner: str) -> None:
        self.cache.release(owner)
        self.holds = {hold for hold in self.holds if hold[0] != owner}

    @rule()
    def evict(self) -> None:
        before = len(self.cache)
        evicted = self.cache.evict_one()
        assert (len(self.cache) == before - 1) == (evicted is not None)

    @invariant()
    def held_features_are_here(self) -> None:
        self.cache.check_integrity()
        for _, key in self.holds:
            assert self.cache.get(key) == f"value of {key}"
        assert self.cache.num_owners == len({owner for owner, _ in self.holds})


class FewIdleMachine(FeatureCacheMachine):
    max_idle = 2


TestFeatureCache = FeatureCacheMachine.TestCase
TestFeatureCacheWithFewIdle = FewIdleMachine.TestCase


def test_least_recently_used_goes_first_and_a_look_is_no_use() -> None:
    cache: FeatureCache[str] = FeatureCache(3)
    for key in "abc":
        cache.put(key, key, 1, "r")
    cache.acquire("a", "r")
    cache.release("r")
    assert cache.get("b") == "b" and "b" in cache and cache.can_put(1)
    assert cache.put("d", "d", 1, "r") == ["b"]
