"""Sections of options; each option says how a change of it reaches what runs.

An option is one field of a section: its type, default, bounds and description, and one of the markers below around
its type. The loader, the schema, the launcher, the instances, the gateway, reload, apply and the docs derive the
rest from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """The way in which a change is applied.

    Attributes:
        how: ``hot``: at once. ``rebuild``: when an instance makes its stages anew, which apply has it do.
            ``restart``: by another process, which apply starts. ``anew``: by another start of the deployment, or
            of a gateway that was started alone; apply refuses it. ``place``: it is no option, but where one
            instance is.
        encoders: of a rebuild: instances that only encode need it as well.
        pinned: of a restart: an instance keeps it in every role.
    """

    how: Literal["hot", "rebuild", "restart", "anew", "place"]
    encoders: bool = True
    pinned: bool = False


Hot = Annotated[T, Applied(how="hot")]
Rebuild = Annotated[T, Applied(how="rebuild")]
LanguageRebuild = Annotated[T, Applied(how="rebuild", encoders=False)]
Restart = Annotated[T, Applied(how="restart")]
Pinned = Annotated[T, Applied(how="restart", pinned=True)]
Anew = Annotated[T, Applied(how="anew")]


class Section(BaseModel):
    """Some keys of the deployment file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: object, info: ValidationInfo) -> object:
        """In Python true is a 1; in a deployment file it is a mistake."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError(f"{str(value).lower()} is not possible here: this key is no switch")
        return value


_PLACE = Applied(how="place")


def applied(field: FieldInfo) -> Applied:
    """Return the way in which a change of a field is applied that is no section itself."""
    return next((one for one in field.metadata if isinstance(one, Applied)), _PLACE)


def changes(
    old: Section, new: Section, fields_of: type[Section] | None = None, prefix: str = ""
) -> Iterator[tuple[str, Applied]]:
    """(path, how it is applied) of each option that differs, as in ``kv_transfer.mode``."""
    for name, field in (fields_of or type(old)).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            yield from changes(before, after, None, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", applied(field)


def taken_over(
    old: Section, new: Section, how: Literal["hot", "rebuild"], fields_of: type[Section] | None = None
) -> dict[str, Any]:
    """Fields of ``old``, for ``model_copy``, that differ in what is applied so, as in ``new``."""
    values: dict[str, Any] = {}
    for name, field in (fields_of or type(old)).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            values[name] = before.model_copy(update=taken_over(before, after, how))
        elif applied(field).how == how:
            values[name] = after
    return values


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Applied, Any]]:
    """(path, how a change is applied, value) of each option."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", applied(field), value
