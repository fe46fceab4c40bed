"""Model families of the native engine: one file each, discovered in this folder. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from epd_serve.models.family import Family


def _families() -> Iterator[type[Family]]:
    for module in iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Family) and value.__module__ == module.name:
                yield value


#: Families by ``model_type`` of config.json; families of the same type differ in their towers.
FAMILIES: dict[str, list[type[Family]]] = {}
for _family in _families():
    for _name in _family.model_types:
        FAMILIES.setdefault(_name, []).append(_family)
#: Language models without a tower.
TEXT = tuple(name for name, (first, *_) in FAMILIES.items() if not first.modalities)

#: Refusal of a checkpoint with ``quantization_config``.
QUANTISED = (
    "quantization_config: the native engine does not run quantised weights; use the unquantised checkpoint, "
    "or engine: vllm"
)
_OWN_CODE = "its checkpoint contains custom code, which is not run"


def refusal(content: Mapping[str, Any]) -> str:
    """Return why a family is unsupported; "" if it is supported. ``content``: the part that answers."""
    model_type = content.get("model_type")
    if model_type in FAMILIES:
        return ""
    if not isinstance(model_type, str):
        return "config.json lacks model_type, so it does not belong to a transformers model"
    return unknown("family", model_type, FAMILIES, _OWN_CODE if "auto_map" in content else "")


def family_of(config: Any) -> type[Family]:
    """Return the family of a model's configuration.

    Raises ValueError, with the supported ones, for an unsupported family or vision tower.
    """
    families = FAMILIES.get(config.model_type)
    if families is None:
        raise ValueError(refusal({"model_type": config.model_type}))
    if not families[0].modalities:
        return families[0]
    part = "audio_config" if families[0].modalities == ("audio",) else "vision_config"
    if getattr(config, part, None) is None:
        raise ValueError(f"{part} is missing; a model of the family {config.model_type!r} needs it for its tower")
    tower = getattr(config, part).model_type
    for family in families:
        if tower in family.towers:
            return family
    raise ValueError(unknown("tower", tower, [name for family in families for name in family.towers]))


def unknown(what: str, model_type: str, known: Iterable[str], why: str = "") -> str:
    """Return the refusal of an unsupported ``model_type``, with the reason if one is known."""
    reason = why and f" ({why})"
    return f"the native engine does not run the {what} {model_type!r}{reason}; it runs {', '.join(known)}"
