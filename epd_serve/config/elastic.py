"""The section ``elastic`` of the deployment file: role switches by load."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from epd_serve.config.sections import Seconds, Section

RoleName = Literal["E", "P", "D", "EP", "ED", "PD", "EPD"]


class ElasticConfig(Section):
    """A controller that switches roles of instances when a stage exceeds its SLO.

    'epd-serve up' starts it if the file has this section.
    """

    cooldown_s: Seconds = Field(
        default=10.0,
        description="Minimum time between two switches. The controller checks ten times as often and reacts to a "
        "stage late in three consecutive checks.",
    )

    @property
    def interval_s(self) -> float:
        """Seconds between two checks of the instances."""
        return self.cooldown_s / 10
