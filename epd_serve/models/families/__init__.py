"""The model families that the native engine runs: a file each, found by being in this folder. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from epd_serve.models.family import Family
from epd_serve.models.not_run import NOT_RUN


def _families() -> Iterator[type[Family]]:
    for module in iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, Family) and value.__module__ == module.name:
                yield value


#: By ``model_type`` of a config.json; those of one type differ by their towers.
FAMILIES: dict[str, list[type[Family]]] = {}
for _family in _families():
    for _name in _family.model_types:
        FAMILIES.setdefault(_name, []).append(_family)
#: Language models without a tower.
TEXT = tuple(name for name, (first, *_) in FAMILIES.items() if not first.modalities)

#: Said of a checkpoint that has ``quantization_config``.
QUANTISED = (
    "quantization_config: the native engine does not run quantised weights; use the checkpoint that is not "
    "quantised, or engine: vllm"
)
_OWN_CODE = "its checkpoint brings code of its own, which is not run"


def refusal(content: Mapping[str, Any]) -> str:
    """Why the family of a config.json is not run; "" where it is. ``content``: that of the part that answers."""
    model_type = content.get("model_type")
    if model_type in FAMILIES:
        return ""
    if not isinstance(model_type, str):
        return "there is no model_type in config.json, so it is no transformers model's"
    return unknown("family", model_type, FAMILIES, _OWN_CODE if "auto_map" in content else "")


def family_of(config: Any) -> type[Family]:
    """The family of a model's configuration.

    Raises ValueError that names what is known, for a family or a vision tower that is not.
    """
    families = FAMILIES.get(config.model_type)
    if families is None:
        raise ValueError(refusal({"model_type": config.model_type}))
    if not families[0].modalities:
        return families[0]
    part = "audio_config" if families[0].modalities == ("audio",) else "vision_config"
    if getattr(config, part, None) is None:
        raise ValueError(f"{part} is missing; without it a model of the family {config.model_type!r} has no tower")
    tower = getattr(config, part).model_type
    for family in families:
        if tower in family.towers:
            return family
    raise ValueError(unknown("tower", tower, [name for family in families for name in family.towers]))


def unknown(what: str, model_type: str, known: Iterable[str], why: str = "") -> str:
    """The refusal of a ``model_type`` that is none of those known; ``why``: where it has no reason of its own."""
    reason = f" ({why})" if (why := NOT_RUN.get(model_type, why)) else ""
    return f"the native engine does not run the {what} {model_type!r}{reason}; it runs {', '.join(known)}"
