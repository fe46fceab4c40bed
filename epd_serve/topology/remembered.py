"""The roles that instances of a local deployment have now, a file each in its directory."""

from __future__ import annotations

from pathlib import Path

from epd_serve.types import Role


def remember_role(directory: Path, name: str, role: Role) -> None:
    """An instance has this role; one of vLLM does not know it, so that others write it down."""
    file = role_file(directory, name)
    new = file.with_suffix(".new")
    new.write_text(str(role), encoding="utf-8")
    new.replace(file)


def remembered_role(directory: Path, name: str) -> Role | None:
    """The one to which an instance was switched last; None where it never was."""
    file = role_file(directory, name)
    return Role.parse(file.read_text(encoding="utf-8")) if file.exists() else None


def role_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.role"
