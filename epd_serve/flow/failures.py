"""Failures of instances: whether another one may do better, and whose they are."""

from __future__ import annotations

from epd_serve.errors import (
    DECODE_DRAINING,
    DRAINING,
    KV_HELD,
    NO_ROOM,
    REQUEST_ENDED,
    InstanceFailed,
    Overloaded,
    ServeError,
    StageTimeout,
)
from epd_serve.routing.policy import Route
from epd_serve.types import Stage


def is_planned(failure: ServeError) -> bool:
    """Whether an instance only leaves its role: nothing speaks against it, nor against another attempt."""
    return failure.code in (DRAINING, DECODE_DRAINING, KV_HELD)


def may_help(failure: ServeError) -> bool:
    """Whether another instance may do better."""
    return failure.status >= 500 or isinstance(failure, Overloaded)


def leaver(route: Route, stage: Stage, failure: ServeError) -> str:
    """Whom a request must not be sent to again after the instance of a stage broke off its answer."""
    is_decodes = stage is Stage.DECODE or failure.code == DECODE_DRAINING
    return (route.decode if is_decodes else route.prefill).name


def blamed(route: Route, stage: Stage, failure: ServeError, *, moves: bool) -> str:
    """Whose failure it is that the instance of a stage, which is alive, reports in place of an answer.

    ``moves``: it was to send KV to D, which others may reach all the same.
    """
    if stage is Stage.PREFILL:
        if moves:
            return leaver(route, stage, failure)
        is_decodes = isinstance(failure, InstanceFailed) or failure.code in (NO_ROOM, REQUEST_ENDED)
        return (route.decode if is_decodes else route.prefill).name
    return (route.prefill if isinstance(failure, StageTimeout) else route.decode).name
