"""How the gateway deals with instances that fail: sections of the deployment file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from epd_serve.config.sections import Section


class FailoverConfig(Section):
    """What a request may try that lost an instance."""

    max_attempts: int = Field(
        default=5, ge=1, le=100, description="Of one request, the first and all continuations included."
    )
    wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=10.0,
        description="How long such a request waits for an instance to be started again where no other is left.",
    )
