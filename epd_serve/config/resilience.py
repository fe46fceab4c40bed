"""The gateway's dealing with instances that fail: sections of the deployment file."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from epd_serve.config.applied import Hot, Section
from epd_serve.config.sections import Seconds

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ValueError(f"{name!r} is no name for an instance; use up to 64 of A-Z, a-z, 0-9, '_', '-' and '.'")
    return name


def _check_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^/?#\s@]+", url.rstrip("/")):
        raise ValueError(f"{url!r} is no control URL; write one as in http://127.0.0.1:8100")
    return url.rstrip("/")


InstanceName = Annotated[str, AfterValidator(_check_name)]
InstanceUrl = Annotated[str, AfterValidator(_check_url)]


class FailoverConfig(Section):
    """The tries of a request that lost an instance."""

    max_attempts: Hot[int] = Field(
        default=5,
        ge=1,
        le=100,
        description="Of one request (of each choice, where it has several that go on apart), the first and all "
        "continuations included.",
    )
    wait_s: Hot[NotNegative | None] = Field(
        default=None,
        description="How long a request waits for an instance to come where none is left for a stage: from when "
        "it lost its own, or from when there was the last one. null: 10 s, and not at all with engine: vllm, "
        "whose processes take about a minute to start.",
    )

    def wait_s_of(self, engine: Literal["native", "vllm"]) -> float:
        """The number of seconds."""
        if self.wait_s is not None:
            return self.wait_s
        return 10.0 if engine == "native" else 0.0


class HealthConfig(Section):
    """The gateway's watch over its instances."""

    probe_interval_s: Hot[Seconds | None] = Field(
        default=3.0,
        description="Each instance is made to compute something so often, where it does not anyway. "
        "null: only those that have failed.",
    )
    probe_timeout_s: Hot[Seconds] = Field(
        default=6.0, description="An instance that computes nothing for so long loses its requests to others."
    )
    max_failures: Hot[int] = Field(
        default=5, ge=1, description="So many failed requests in a row take an instance out until a probe passes."
    )
    max_failure_rate: Hot[float] = Field(
        default=0.5, gt=0, le=1, description="So does this share of the last 30 s, where there were 20 requests."
    )
    slow_start_s: Hot[NotNegative] = Field(
        default=10.0, description="Over so long an instance that comes back gets its share of work bit by bit."
    )
