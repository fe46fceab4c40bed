"""The directory of a local deployment in which instances find settings by role and the role wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from epd_serve.config.applied import applied, taken_over
from epd_serve.config.elastic import RoleName
from epd_serve.config.options import InstanceOptions
from epd_serve.config.schema import DeploymentConfig
from epd_serve.config.sections import InstanceSettings
from epd_serve.topology.remembered import remember_role, remembered_role
from epd_serve.types import Role

_SETTINGS = "roles.json"


def write_role_settings(directory: Path, config: DeploymentConfig) -> None:
    """For :func:`in_role`: in a directory in which nothing runs yet."""
    for old in directory.glob("*.role"):  # of a deployment before, in the same directory
        old.unlink()
    replace_role_settings(directory, config)


def replace_role_settings(directory: Path, config: DeploymentConfig) -> None:
    """The same while instances run: those that come to another role from now on have its settings by this."""
    new = directory / f"{_SETTINGS}.new"
    names = set(InstanceSettings.model_fields)
    settings = {
        role: config.settings_for(role).model_dump(mode="json", include=names) for role in get_args(RoleName)
    }
    new.write_text(json.dumps(settings), encoding="utf-8")
    new.replace(directory / _SETTINGS)


def with_settings(options: InstanceOptions, role: Role, settings: InstanceSettings) -> InstanceOptions:
    """The options of the same instance, started again in a role with these settings."""
    fields = InstanceSettings.model_fields.items()
    changes = {
        name: getattr(settings, name) for name, field in fields if not (how := applied(field)) or not how.pinned
    }
    return options.model_copy(update={"role": role, **changes})


def rebuilt(options: InstanceOptions, role: Role, settings: InstanceSettings) -> InstanceOptions:
    """Return the options after a rebuild, which applies some changes; the process keeps the rest."""
    return options.model_copy(update={"role": role, **taken_over(options, settings, "rebuild", InstanceSettings)})


def in_role(options: InstanceOptions, role: Role) -> InstanceOptions:
    """Return the options of the same instance in another role, with the deployment's settings for that."""
    if options.switch_dir is None or not (file := options.switch_dir / _SETTINGS).exists():
        return options.model_copy(update={"role": role})
    settings = json.loads(file.read_text(encoding="utf-8"))[str(role)]
    return with_settings(options, role, InstanceSettings.model_validate(settings))


def remember(options: InstanceOptions) -> None:
    """The instance has this role when it is started again."""
    if options.switch_dir is not None:
        remember_role(options.switch_dir, options.name, options.role)


def directory_of(file: Path) -> Path | None:
    """The directory of the local deployment whose gateway has this file; None for a file of somebody's own."""
    return file.parent if (file.parent / _SETTINGS).exists() else None


def remembered(options: InstanceOptions) -> InstanceOptions:
    """The options of an instance that is started, or started again."""
    role = None if options.switch_dir is None else remembered_role(options.switch_dir, options.name)
    return options if role is None or role == options.role else in_role(options, role)
