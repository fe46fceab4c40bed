"""The oldest go first, and what an id ended as does not change."""

from epd_serve.transfer.reservation import Tombstones


def test_the_newest_are_remembered_with_how_they_ended() -> None:
    ended: Tombstones[str] = Tombstones(capacity=2)
    ended.add("a", "completed")
    ended.add("a", "released")
    assert ended.get("a") == "completed"
    ended.add("b", "released")
    ended.add("c", "released")
    assert "a" not in ended
    assert ended.get("a") is None
    assert "b" in ended
    assert "c" in ended
