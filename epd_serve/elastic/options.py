"""The SLO that the controller of roles works for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The SLO: seconds to the first token, and between two of them.

    Attributes:
        share: part of ``ttft_s`` that the queue of one stage may take.
    """

    ttft_s: float
    tpot_s: float
    share: float = 0.5

    @property
    def queue_s(self) -> float:
        return self.share * self.ttft_s
