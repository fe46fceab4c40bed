"""How a controller behaves."""

from __future__ import annotations

from dataclasses import dataclass

from epd_serve.types import Role

SINGLE_ROLES = (Role.parse("E"), Role.parse("P"), Role.parse("D"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The SLO: seconds to the first token, and between two of them.

    Attributes:
        share: of ``ttft_s``, what the queue of one stage may take.
    """

    ttft_s: float
    tpot_s: float
    share: float = 0.5

    @property
    def queue_s(self) -> float:
        return self.share * self.ttft_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerOptions:
    """Attributes:
    roles: that an instance may be given.
    cooldown_s: between two orders, at least; also how far ahead queues are predicted.
    hold_s: how long a stage must be late on average before anything is done.
    window_s: over which demand is averaged, whatever switches there were.
    hysteresis: part by which a switch must lower the predicted pressure.
    forget_s: for how long a layout that was left for its pressure is not gone back to at a lower one.
    deadline_s: of a switch; one that is not seen by then has failed.
    calm_s: how long the load must be low before fewer instances are wished for.
    dry_run: decide and say so, and order nothing.
    """

    roles: tuple[Role, ...] = SINGLE_ROLES
    cooldown_s: float = 10.0
    hold_s: float = 3.0
    window_s: float = 15.0
    hysteresis: float = 0.1
    forget_s: float = 300.0
    deadline_s: float = 30.0
    calm_s: float = 60.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        if not self.roles:
            raise ValueError("a controller needs roles that it may give")
        times = (self.cooldown_s, self.hold_s, self.window_s, self.deadline_s, self.forget_s, self.calm_s)
        if min(times) <= 0:
            raise ValueError("a controller's times must be above 0 s")
        if not 0 < self.hysteresis < 1:
            raise ValueError(f"hysteresis {self.hysteresis:g} is no part between 0 and 1")
