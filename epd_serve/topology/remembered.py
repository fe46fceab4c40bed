"""The current roles of a local deployment's instances, one file each in its directory."""

from __future__ import annotations

from pathlib import Path

from epd_serve.types import Role


def remember_role(directory: Path, name: str, role: Role) -> None:
    """Write down an instance's role, which vLLM's instances do not know themselves."""
    file = role_file(directory, name)
    new = file.with_suffix(".new")
    new.write_text(str(role), encoding="utf-8")
    new.replace(file)


def remembered_role(directory: Path, name: str) -> Role | None:
    """Return the role that an instance was last switched to, if ever."""
    file = role_file(directory, name)
    return Role.parse(file.read_text(encoding="utf-8")) if file.exists() else None


def role_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.role"
