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
        "name", "role", "model", "served_model_name", "host", "port", "device", "dtype",
        "generation_config", "threads", "share", "share_start", "memory_share", "stream_priority", "device_board",
        "mooncake_master", "switch_dir", "join", "trace",
    }
)  # fmt: skip


#: What an instance takes over when its stages are made anew; the rest of its options it keeps until its end.
REBUILT = frozenset(
    {
        "block_size", "num_blocks", "kv_cache_bytes", "max_num_batched_tokens", "max_num_seqs", "async_scheduling",
        "max_model_len", "feature_cache_bytes", "lease_s", "drain_s", "kv_mode", "kv_group_layers",
        "feature_prefetch", "batching_alpha", "batching_order", "batching_policy", "batching_encodes", "steals",
        "feature_store_bytes", "feature_batch", "feature_batch_ms", "image_budget_pixels",
    }
)  # fmt: skip


def role_settings(config: DeploymentConfig) -> dict[str, dict[str, Any]]:
    """What the deployment says of each role, whether an instance has it yet or not."""
    settings: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        placed = InstancePlacement(name="any", role=Role.parse(role), devices=("cpu",))
        options = config.options_for(placed, device="cpu", port=0, threads=1)
        settings[role] = {name: value for name, value in vars_of(options).items() if name not in _OWN}
    return settings


def write_role_settings(directory: Path, config: DeploymentConfig) -> None:
    """For :func:`in_role`: in a directory in which nothing runs yet."""
    for old in directory.glob("*.role"):  # of a deployment before, in the same directory
        old.unlink()
    replace_role_settings(directory, config)


def replace_role_settings(directory: Path, config: DeploymentConfig) -> None:
    """The same while instances run: those that come to another role from now on have its settings by this."""
    new = directory / f"{_SETTINGS}.new"
    new.write_text(json.dumps(role_settings(config)), encoding="utf-8")
    new.replace(directory / _SETTINGS)


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
    role = None if options.switch_dir is None else remembered_role(options.switch_dir, options.name)
    return options if role is None or role == options.role else in_role(options, role)


def remembered_role(directory: Path, name: str) -> Role | None:
    """The one to which an instance was switched last; None where it never was."""
    file = role_file(directory, name)
    return Role.parse(file.read_text(encoding="utf-8")) if file.exists() else None


def role_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.role"
