"""What the instances of a local deployment find in a directory of their own: settings by role, the role wanted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd_serve.config.options import InstanceOptions
from epd_serve.config.schema import DeploymentConfig
from epd_serve.topology import InstancePlacement
from epd_serve.types import Role

_SETTINGS = "roles.json"
ROLES = ("E", "P", "D", "EP", "ED", "PD", "EPD")
#: Of an instance and its device, whatever its role.
_OWN = frozenset(
    {
        "name", "role", "model", "served_model_name", "host", "port", "device", "dtype", "threads", "share",
        "share_start", "memory_share", "stream_priority", "device_board", "mooncake_master", "switch_dir", "trace",
    }
)  # fmt: skip


def write_role_settings(directory: Path, config: DeploymentConfig) -> None:
    """For :func:`in_role`: what the deployment says of each role, whether an instance has it yet or not."""
    settings: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        placed = InstancePlacement(name="any", role=Role.parse(role), devices=("cpu",))
        options = config.options_for(placed, device="cpu", port=0, threads=1)
        settings[role] = {name: value for name, value in vars_of(options).items() if name not in _OWN}
    for old in directory.glob("*.role"):  # of a deployment before, in the same directory
        old.unlink()
    (directory / _SETTINGS).write_text(json.dumps(settings), encoding="utf-8")


def vars_of(options: InstanceOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def in_role(options: InstanceOptions, role: Role) -> InstanceOptions:
    """The options of the same instance in another role, with the deployment's settings for that.

    Raises ValueError for a role that it cannot have.
    """
    if len(options.devices) > 1 and not role.has_language_model:
        raise ValueError(
            f"{options.name} shares its language model out over {len(options.devices)} devices, and role {role} "
            "has none; order a role with P or D"
        )
    settings: dict[str, Any] = {}
    if options.switch_dir is not None and (file := options.switch_dir / _SETTINGS).exists():
        settings = json.loads(file.read_text(encoding="utf-8"))[str(role)]
    return replace(options, role=role, **settings)


def remember(options: InstanceOptions) -> None:
    """The instance has this role when it is started again."""
    if options.switch_dir is not None:
        file = role_file(options.switch_dir, options.name)
        new = file.with_suffix(".new")
        new.write_text(str(options.role), encoding="utf-8")
        new.replace(file)


def remembered(options: InstanceOptions) -> InstanceOptions:
    """The options of an instance that is started, or started again."""
    if options.switch_dir is None or not (file := role_file(options.switch_dir, options.name)).exists():
        return options
    role = Role.parse(file.read_text(encoding="utf-8"))
    return options if role == options.role else in_role(options, role)


def role_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.role"
