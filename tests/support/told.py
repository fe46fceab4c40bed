"""The options that a launcher gives an instance."""

from __future__ import annotations

from collections.abc import Sequence

from epd_serve.config import InstanceOptions


def told(command: Sequence[str]) -> InstanceOptions:
    """The options in the command line of an instance's process."""
    return InstanceOptions.model_validate_json(command[command.index("--options") + 1])
