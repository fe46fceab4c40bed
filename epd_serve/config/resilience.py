"""How the gateway deals with instances that fail: sections of the deployment file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from epd_serve.config.sections import Seconds, Section


class FailoverConfig(Section):
    """What a request may try that lost an instance."""

    max_attempts: int = Field(
        default=5, ge=1, le=100, description="Of one request, the first and all continuations included."
    )
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=10.0,
        description="How long such a request waits for an instance to be started again where no other is left.",
    )


class HealthConfig(Section):
    """How the gateway watches its instances."""

    probe_interval_s: Seconds | None = Field(
        default=3.0,
        description="Each instance is made to compute something so often, where it does not anyway. "
        "null: only those that have failed.",
    )
    probe_timeout_s: Seconds = Field(
        default=6.0, description="An instance that computes nothing for so long loses its requests to others."
    )
    max_failures: int = Field(
        default=5, ge=1, description="So many failed requests in a row take an instance out until a probe passes."
    )
    max_failure_rate: float = Field(
        default=0.5, gt=0, le=1, description="So does this share of the last 30 s, where there were 20 requests."
    )
    slow_start_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=10.0, description="Over so long an instance that comes back gets its share of work bit by bit."
    )
