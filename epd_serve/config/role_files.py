"""Files of a local deployment: the settings of each role, and the last role of each instance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from epd_serve.config.elastic import RoleName
from epd_serve.config.options import InstanceOptions
from epd_serve.config.schema import DeploymentConfig
from epd_serve.config.sections import InstanceSettings
from epd_serve.topology.remembered import remember_role, remembered_role
from epd_serve.types import Role

_SETTINGS = "roles.json"
#: Options that a process keeps in every role.
OF_PROCESS = frozenset({"threads", "share", "memory_share", "tower_share", "resident"})


def write_role_settings(directory: Path, config: DeploymentConfig) -> None:
    """Write the settings of each role, for instances that switch roles from now on."""
    settings = {
        role: config.settings_for(role).model_dump(mode="json", include=set(InstanceSettings.model_fields))
        for role in get_args(RoleName)
    }
    new = directory / f"{_SETTINGS}.new"
    new.write_text(json.dumps(settings), encoding="utf-8")
    new.replace(directory / _SETTINGS)


def with_settings(options: InstanceOptions, role: Role, settings: InstanceSettings) -> InstanceOptions:
    """Return the options of the same process in a role with these settings."""
    names = InstanceSettings.model_fields.keys() - OF_PROCESS
    return options.model_copy(update={"role": role, **{name: getattr(settings, name) for name in names}})


def in_role(options: InstanceOptions, role: Role) -> InstanceOptions:
    """Return the options of the same instance in another role, with the deployment's settings for it."""
    if options.switch_dir is None or not (file := options.switch_dir / _SETTINGS).exists():
        return options.model_copy(update={"role": role})
    settings = json.loads(file.read_text(encoding="utf-8"))[str(role)]
    return with_settings(options, role, InstanceSettings.model_validate(settings))


def remember(options: InstanceOptions) -> None:
    """Save the role of an instance for its next start."""
    if options.switch_dir is not None:
        remember_role(options.switch_dir, options.name, options.role)


def remembered(options: InstanceOptions) -> InstanceOptions:
    """Return the options of a starting instance in its last role, if saved."""
    role = None if options.switch_dir is None else remembered_role(options.switch_dir, options.name)
    return options if role is None or role == options.role else in_role(options, role)


def directory_of(file: Path) -> Path | None:
    """Return the directory of the local deployment whose gateway has this file; None for a user's own file."""
    return file.parent if (file.parent / _SETTINGS).exists() else None
