"""The model families that the native engine runs: a file each, found by being in this folder. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from epd_serve.models.family import Family


def _families() -> Iterator[type[Family]]:
    for module in iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Family) and value.__module__ == module.name:
                yield value


#: By ``model_type`` of a config.json.
FAMILIES: dict[str, type[Family]] = {name: family for family in _families() for name in family.model_types}
#: Language models without a tower.
TEXT = tuple(name for name, family in FAMILIES.items() if not family.modalities)
#: Their experts are not split over several devices.
MIXTURES_OF_EXPERTS = tuple(name for name, family in FAMILIES.items() if name in family.mixtures)
