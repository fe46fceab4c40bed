"""What follows a failure: whom a request avoids, how long it waits, and what it fails with."""

import pytest

from epd_serve import errors
from epd_serve.errors import InstanceFailed, InstanceLost, ServeError, Unavailable
from epd_serve.routing.retry import MAX_ATTEMPTS, CallFailed, Retry
from epd_serve.routing.routes import Demand, Router
from epd_serve.types import Stage

P, D = Stage.PREFILL, Stage.DECODE
NOW_S, WAIT_S = 100.0, 10.0


def retry_of(table, **demand):
    return Retry(table, Router(), "m", Demand(**demand))


def pick(retry):
    route = retry.pick_route(NOW_S, WAIT_S, NOW_S)
    assert route is not None
    return route


def names(route):
    return route.prefill.name, route.decode.name


CULPRITS = [
    (P, InstanceLost("gone"), False, "p"),
    (D, InstanceLost("gone"), True, "d"),
    (P, errors.Overloaded("full"), False, "p"),
    (P, InstanceFailed("D failed under it"), False, "d"),
    (P, InstanceFailed("P failed"), True, "p"),
    (P, Unavailable("D has no room", code=errors.NO_ROOM), False, "d"),
    (P, Unavailable("D ended it", code=errors.REQUEST_ENDED), False, "d"),
    (P, InstanceFailed("no way to D", code=errors.PEER_UNREACHABLE), True, "d"),
    (D, errors.StageTimeout("P sent nothing"), False, "p"),
    (D, errors.Conflict("changing"), False, "d"),
    (P, Unavailable("P leaves", code=errors.DRAINING), False, "p"),
    (P, InstanceFailed("D leaves", code=errors.DECODE_DRAINING), True, "d"),
]


@pytest.mark.parametrize(("stage", "error", "began", "culprit"), CULPRITS)
def test_the_next_attempt_avoids_the_culprit_alone(build, stage, error, began, culprit):
    retry = retry_of(build("p0:P", "p1:P", "d0:D", "d1:D"))
    first = pick(retry)
    retry.fail_attempt(first, CallFailed(stage, error, began=began))
    for _ in range(3):
        prefill, decode = names(pick(retry))
        avoided = first.prefill.name if culprit == "p" else first.decode.name
        assert avoided not in (prefill, decode)


def test_an_instance_that_failed_is_asked_again_in_its_next_life(build):
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


def test_lost_connections_are_preferred_least_but_not_excluded(build):
    table = build("p0:P", "d0:D", "d1:D")
    retry = retry_of(table)
    lost = {names(pick(retry))[1]}
    for _ in range(2):
        route = pick(retry)
        retry.fail_attempt(route, CallFailed(P, InstanceFailed("no way", code=errors.PEER_UNREACHABLE)))
        lost.add(route.decode.name)
    assert lost == {"d0", "d1"}
    assert names(pick(retry))[1] in lost


def test_attempts_are_bounded_and_planned_leaving_does_not_count(build):
    table = build("a0:EPD", "a1:EPD")
    retry = retry_of(table)
    for _ in range(2 * MAX_ATTEMPTS):
        route = pick(retry)
        retry.fail_attempt(route, CallFailed(P, Unavailable("it leaves", code=errors.DRAINING)))
        assert not route.prefill.ready, "no request goes there until it says that it is ready"
        build.update(table, f"{route.prefill.name}:EPD")
    for _ in range(MAX_ATTEMPTS - 1):
        retry.fail_attempt(pick(retry), CallFailed(P, InstanceLost("gone")))
    with pytest.raises(InstanceLost):
        retry.fail_attempt(pick(retry), CallFailed(P, InstanceLost("gone")))


@pytest.mark.parametrize(("num_choices", "generated", "code"), [(1, None, "x"), (2, None, errors.CHOICES_LOST)])
def test_a_stream_that_cannot_go_on_fails(build, num_choices, generated, code):
    retry = retry_of(build("a0:EPD", "a1:EPD"), num_sequences=num_choices)
    retry.fail_attempt(pick(retry), CallFailed(P, InstanceFailed("broken", code="x"), began=True))
    failure = CallFailed(P, InstanceFailed("broken", code="x"), began=True)
    with pytest.raises(InstanceFailed) as failed:
        retry.fail_attempt(pick(retry), failure, begun=True, generated=generated)
    assert failed.value.code == code


def test_a_request_waits_for_a_stage_that_was_there(build):
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


def test_after_a_failure_it_waits_in_full_and_tells_why(build):
    table = build("p0:P", "d0:D")
    retry = retry_of(table)
    retry.fail_attempt(pick(retry), CallFailed(D, InstanceLost("d0 is gone")))
    table.mark_down("d0")
    assert retry.pick_route(NOW_S + 5, WAIT_S, NOW_S - 60) is None
    with pytest.raises(InstanceLost, match=r"d0 is gone; .* within 10 s"):
        retry.pick_route(NOW_S + 15, WAIT_S, NOW_S - 60)
