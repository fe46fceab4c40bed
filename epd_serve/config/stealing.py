"""The gateway's rule for work stealing, and which instances may steal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from epd_serve.config.applied import Anew, Section
from epd_serve.config.sections import InstanceSettings
from epd_serve.topology import InstancePlacement


class StealingConfig(Section):
    """Instances with ``steals: true`` take requests from the others' queue (HeteroServe, section 5.3)."""

    threshold: Anew[int] = Field(
        default=16,
        ge=0,
        description="Nothing is taken while no more requests wait for a language model.",
    )
    batch: Anew[int] = Field(
        default=16, ge=2, description="Sequences that a thief has at most; it takes half as many at a time."
    )
    collect_ms: Anew[float] = Field(
        default=100.0,
        ge=0,
        allow_inf_nan=False,
        description="How long it may go on to fill such a half while fewer wait than the threshold.",
    )


def check_thieves(
    engine: str, placement: Sequence[InstancePlacement], settings: Mapping[str, InstanceSettings]
) -> None:
    """Raises ValueError for roles that cannot steal, and where there is nobody to be stolen from."""
    thieves = {str(one.role) for one in placement if settings[str(one.role)].steals}
    if not thieves:
        return
    if engine != "native":
        raise ValueError("steals is for engine: native; vLLM's instances take what they are given")
    if wrong := sorted(thieves - {"EPD"}):
        raise ValueError(
            f"steals is set for {', '.join(wrong)}, which lacks a stage: a thief encodes, and prefills and "
            "decodes what it takes; write EPD in the topology and steals: true under roles: EPD, as in 2EPD-2PD"
        )
    stages = {stage for one in placement if str(one.role) not in thieves for stage in str(one.role)}
    if not {"P", "D"} <= stages:
        raise ValueError(
            "every instance with a language model steals, so there is nobody to steal from; add PD, or P and D, "
            "as in 2EPD-2PD"
        )
