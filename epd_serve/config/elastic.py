"""The section ``elastic`` of the deployment file: role switches by load."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from epd_serve.config.sections import Seconds, Section

RoleName = Literal["E", "P", "D", "EP", "ED", "PD", "EPD"]


class ElasticConfig(Section):
    """A controller that switches roles of instances when a stage is later than the SLO allows."""

    enabled: bool = Field(default=False, description="Whether 'epd-serve up' starts 'epd-serve autoscale'.")
    dry_run: bool = Field(default=False, description="Decide and log, and change nothing.")
    interval_s: Seconds = Field(
        default=1.0,
        description="Between two looks at the instances. A stage that is late for three looks is answered.",
    )
    cooldown_s: Seconds = Field(default=10.0, description="Between two switches, at least.")
    roles: tuple[RoleName, ...] = Field(
        default=("E", "P", "D"), min_length=1, description="That instances may be given."
    )
