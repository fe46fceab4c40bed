"""The section ``elastic`` of the deployment file: role switches by themselves, hooks, drift of the workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from epd_serve.config.applied import Anew, Section
from epd_serve.config.sections import Seconds

RoleName = Literal["E", "P", "D", "EP", "ED", "PD", "EPD"]


class HookConfig(Section):
    """A program that is told that the controller wants more or fewer instances, or that the workload has drifted.

    A JSON object with ``event`` ("more", "fewer", "drift" or "plan"), ``role`` and ``reason`` is what it gets, of
    a plan also the deployment file, as ``plan``.
    """

    command: Anew[tuple[Annotated[str, Field(min_length=1)], ...] | None] = Field(
        default=None, description="Program and arguments; it reads the object from its standard input."
    )
    url: Anew[Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None] = Field(
        default=None, description="Gets the object by POST."
    )
    timeout_s: Anew[Seconds] = Field(default=30.0, description="How long either may take.")

    @model_validator(mode="after")
    def _one_of_both(self) -> HookConfig:
        if (self.command is None) == (self.url is None):
            raise ValueError("write either command: [program, argument ...] or url: http://...")
        if self.command == ():
            raise ValueError("command: [] names no program; write [program, argument ...]")
        return self


class DriftConfig(Section):
    """Planning anew when the workload is another one: lengths, share of images, rate."""

    enabled: Anew[bool] = Field(
        default=False, description="Whether served requests are compared with earlier ones."
    )
    num_requests: Anew[int] = Field(
        default=200, ge=20, description="Of each of the two windows that are compared."
    )
    factor: Anew[float] = Field(
        default=1.5, gt=1, allow_inf_nan=False, description="By which a mean must have changed."
    )
    devices: Anew[Path | None] = Field(
        default=None,
        description="The YAML of 'epd-serve plan --devices', relative to this file: a drift is answered "
        "with a plan. null: it is only said.",
    )
    apply: Anew[bool] = Field(
        default=False,
        description="Whether a plan's topology and devices are applied at once, as by 'epd-serve apply "
        "--topology-only'; for deployments of 'epd-serve up'. false: the hook gets the plan, and that is all.",
    )
    most: Anew[int] = Field(default=500, ge=50, description="Requests in one simulation of the plan, at most.")

    @model_validator(mode="after")
    def _applies_plans(self) -> DriftConfig:
        if self.apply and self.devices is None:
            raise ValueError(
                "apply: true needs a plan to apply; set devices, the YAML of 'epd-serve plan --devices'"
            )
        return self


class ElasticConfig(Section):
    """A controller that has instances change their roles when a stage is later than the SLO allows."""

    enabled: Anew[bool] = Field(default=False, description="Whether 'epd-serve up' starts 'epd-serve autoscale'.")
    dry_run: Anew[bool] = Field(default=False, description="Decide and log, and change nothing.")
    interval_s: Anew[Seconds] = Field(default=1.0, description="Between two looks at the instances.")
    hold_s: Anew[Seconds] = Field(
        default=3.0, description="How long a stage must be late before anything is done."
    )
    window_s: Anew[Seconds] = Field(default=15.0, description="Over which demand is averaged.")
    cooldown_s: Anew[Seconds] = Field(default=10.0, description="Between two switches, at least.")
    hysteresis: Anew[float] = Field(
        default=0.1, gt=0, lt=1, description="Part by which a switch must lower the predicted pressure."
    )
    deadline_s: Anew[Seconds] = Field(
        default=30.0, description="For an instance to be empty; one that is not by then keeps its role."
    )
    roles: Anew[tuple[RoleName, ...]] = Field(
        default=("E", "P", "D"), min_length=1, description="That instances may be given."
    )
    hook: Anew[HookConfig | None] = Field(default=None, description="Tells an outside autoscaler.")
    drift: DriftConfig = DriftConfig()
