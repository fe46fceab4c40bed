"""Steps of a thief wait for its encodes."""

from __future__ import annotations

from epd_serve.engine.dual_stream import VisionHold
from epd_serve.sched.encode import VisionFirst


def test_a_step_waits_while_there_are_images_and_not_for_ever() -> None:
    now, items, told = 0.0, 0, []

    def sleep(seconds: float) -> None:
        nonlocal now, items
        now += seconds
        if now > 0.1 and items < 9:
            items = 0

    hold = VisionHold(
        lambda: items,
        lambda: told.append(now),
        rule=VisionFirst(patience_s=1.0),
        clock=lambda: now,
        sleep=sleep,
    )
    hold()
    assert (now, told) == (0.0, [])
    items = 2
    hold()
    assert 0.1 < now < 0.2 and told == [0.0] and hold.held_s == now
    items, began = 9, now
    hold()
    assert began + 1.0 <= now < began + 1.1, "images never end, and one step is let through"
    hold()
    assert now >= began + 2.0
