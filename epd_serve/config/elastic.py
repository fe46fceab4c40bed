"""The section ``elastic`` of the deployment file: role switches by load."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from epd_serve.config.sections import Seconds, Section

RoleName = Literal["E", "P", "D", "EP", "ED", "PD", "EPD"]


class ElasticConfig(Section):
    """A controller that switches roles of instances when a stage is later than the SLO allows.

    'epd-serve up' starts it where the file has this section.
    """

    cooldown_s: Seconds = Field(
        default=10.0,
        description="Between two switches, at least. The controller looks ten times as often; a stage that is "
        "late for three looks is answered.",
    )

    @property
    def interval_s(self) -> float:
        """Seconds between two looks at the instances."""
        return self.cooldown_s / 10
