"""What follows a failure: whom a request avoids, how long it waits, and what it fails with."""

from __future__ import annotations

from typing import Any

import pytest

from epd_serve.errors import (
    DECODE_DRAINING,
    DRAINING,
    NO_ROOM,
    PEER_UNREACHABLE,
    PREPARATION_FULL,
    REQUEST_ENDED,
    Conflict,
    InstanceFailed,
    InstanceLost,
    InvalidRequest,
    Overloaded,
    ServeError,
    StageTimeout,
    Unavailable,
)
from epd_serve.routing.retry import MAX_ATTEMPTS, CallFailed, ItemEncoders, Retry
from epd_serve.routing.routes import Demand, Route, RoutePolicy
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage

P, D = Stage.PREFILL, Stage.DECODE
NOW_S, WAIT_S = 100.0, 10.0


def retry_of(table: InstanceTable, **demand: Any) -> Retry:
    return Retry(table, RoutePolicy(), "m", Demand(**demand))


def pick(retry: Retry, now_s: float = NOW_S, wait_s: float = WAIT_S, complete_at_s: float | None = NOW_S) -> Route:
    route = retry.pick_route(now_s, wait_s, complete_at_s)
    assert route is not None
    return route


def names(route: Route) -> tuple[str, str]:
    return route.prefill.name, route.decode.name


CULPRITS = [
    (P, InstanceLost("gone"), False, "p"),
    (D, InstanceLost("gone"), True, "d"),
    (P, Overloaded("full"), False, "p"),
    (P, InstanceFailed("D failed under it"), False, "d"),
    (P, InstanceFailed("P failed"), True, "p"),
    (P, Unavailable("D has no room", code=NO_ROOM), False, "d"),
    (P, Unavailable("D ended it", code=REQUEST_ENDED), False, "d"),
    (P, InstanceFailed("no way to D", code=PEER_UNREACHABLE), True, "d"),
    (D, StageTimeout("P sent nothing"), False, "p"),
    (D, Conflict("changing"), False, "d"),
    (P, Unavailable("P leaves", code=DRAINING), False, "p"),
    (P, InstanceFailed("D leaves", code=DECODE_DRAINING), True, "d"),
]


@pytest.mark.parametrize(("stage", "error", "began", "culprit"), CULPRITS)
def test_the_next_attempt_avoids_the_culprit_alone(build, stage, error, began, culprit) -> None:
    retry = retry_of(build("p0:P", "p1:P", "d0:D", "d1:D"))
    first = pick(retry)
    retry.fail_attempt(first, CallFailed(stage, error, began=began))
    for _ in range(3):
        prefill, decode = names(pick(retry))
        avoided = first.prefill.name if culprit == "p" else first.decode.name
        assert avoided not in (prefill, decode)


def test_an_instance_that_failed_is_asked_again_in_its_next_life(build) -> None:
    table = build("a0:EPD")
    retry = retry_of(table)
    retry.fail_attempt(pick(retry), CallFailed(P, ServeError("out of memory")))
    with pytest.raises(ServeError, match="out of memory"):
        retry.pick_route(NOW_S, WAIT_S, NOW_S)
    retry = retry_of(table)
    retry.fail_attempt(pick(retry), CallFailed(P, ServeError("out of memory")))
    table.mark_down("a0")
    assert retry.pick_route(NOW_S, WAIT_S, NOW_S) is None
    build.update(table, "a0:EPD")
    assert names(pick(retry)) == ("a0", "a0")


def test_lost_connections_are_preferred_least_but_not_excluded(build) -> None:
    table = build("p0:P", "d0:D", "d1:D")
    retry = retry_of(table)
    lost = {names(pick(retry))[1]}
    for _ in range(2):
        route = pick(retry)
        retry.fail_attempt(route, CallFailed(P, InstanceFailed("no way", code=PEER_UNREACHABLE)))
        lost.add(route.decode.name)
    assert lost == {"d0", "d1"}
    assert names(pick(retry))[1] in lost


def test_attempts_are_bounded_and_planned_leaving_does_not_count(build) -> None:
    table = build("a0:EPD", "a1:EPD")
    retry = retry_of(table)
    for _ in range(2 * MAX_ATTEMPTS):
        route = pick(retry)
        retry.fail_attempt(route, CallFailed(P, Unavailable("it leaves", code=DRAINING)))
        assert not route.prefill.ready, "no request goes there until it says that it is ready"
        build.update(table, f"{route.prefill.name}:EPD")
    for _ in range(MAX_ATTEMPTS - 1):
        retry.fail_attempt(pick(retry), CallFailed(P, InstanceLost("gone")))
    with pytest.raises(InstanceLost):
        retry.fail_attempt(pick(retry), CallFailed(P, InstanceLost("gone")))


def test_a_request_waits_for_a_stage_that_was_there(build) -> None:
    table = build("p0:P", "d0:D")
    table.mark_down("d0")
    retry = retry_of(table)
    assert retry.pick_route(NOW_S, WAIT_S, NOW_S - 1) is None
    assert retry.pick_route(NOW_S + 8.9, WAIT_S, NOW_S - 1) is None
    with pytest.raises(Unavailable):
        retry.pick_route(NOW_S + 9.1, WAIT_S, NOW_S - 1)
    for complete_at_s in (None, NOW_S - 11):
        with pytest.raises(Unavailable):
            retry_of(table).pick_route(NOW_S, WAIT_S, complete_at_s)


def test_after_a_failure_it_waits_in_full_and_tells_why(build) -> None:
    table = build("p0:P", "d0:D")
    retry = retry_of(table)
    retry.fail_attempt(pick(retry), CallFailed(D, InstanceLost("d0 is gone")))
    table.mark_down("d0")
    assert retry.pick_route(NOW_S + 5, WAIT_S, NOW_S - 60) is None
    with pytest.raises(InstanceLost, match=r"d0 is gone; .* within 10 s"):
        retry.pick_route(NOW_S + 15, WAIT_S, NOW_S - 60)


# ------------------------------------------------------------------ encoders


def item_of(build: Any, table: InstanceTable) -> ItemEncoders:
    return ItemEncoders(build.item("x"), "messages[0]", table["e0"])


def asked(build: Any, table: InstanceTable, error: ServeError) -> list[str]:
    """The encoders of one item, the first included, while each of them fails."""
    item, found = item_of(build, table), ["e0"]
    try:
        while True:
            item.pick_next(table, table["p0"], error)
            found.append(item.encoder.name)
    except ServeError as ended:
        found.append(type(ended).__name__)
    return found


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ServeError("out of memory"), ["e0", "e1", "e2", "p0", "InstanceFailed"]),
        (InvalidRequest("a broken picture"), ["e0", "InvalidRequest"]),
        (Unavailable("busy", code=PREPARATION_FULL), ["e0", "e1", "e2", "Unavailable"]),
        (Unavailable("leaves", code=DRAINING), ["e0", "e1", "e2", "p0", "Unavailable"]),
    ],
)
def test_encoders_of_an_item_in_turn(build, error, found) -> None:
    table = build("e0:E", "e1:E", "e2:E", "p0:P", "d0:D")
    result = asked(build, table, error)
    if len(found) > 3:
        assert sorted(result[1:3]) == found[1:3], "the others, in the order of the item's hash"
        result[1:3] = found[1:3]
    assert result == found
