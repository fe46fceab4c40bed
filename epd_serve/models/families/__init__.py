"""The model families that the native engine runs: a file each, found by being in this folder. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from epd_serve.models.family import Family


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
#: Families whose layers are not split over several devices, and these layers.
NOT_SPLIT = {
    **{name: "its layers" for name, (first, *_) in FAMILIES.items() if first.decoder == "generic"},
    **{name: "mixture-of-experts layers" for name, (first, *_) in FAMILIES.items() if name in first.mixtures},
}

_LATENT = "its KV is latent"
#: Known families that the native engine does not run, and the reason.
NOT_RUN = {
    "internvl_chat": "it is in another format than transformers'; take the checkpoint whose name ends with -hf",
    "mllama": "pictures reach its language model by cross-attention",
    "phi4_multimodal": "transformers has no function that makes its features alone",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k25"), _LATENT),
    "deepseek_ocr2": "its layers are mixtures of experts",
}
#: Said of a checkpoint that has ``quantization_config``.
QUANTISED = (
    "quantization_config: the native engine does not run quantised weights; use the checkpoint that is not "
    "quantised, or engine: vllm"
)


def reason(model_type: str) -> str:
    """In brackets, why a family is not run; "" where there is no more to be said."""
    return f" ({NOT_RUN[model_type]})" if model_type in NOT_RUN else ""


def family_of(config: Any) -> type[Family]:
    """The family of a model's configuration.

    Raises ValueError that names what is known, for a family or a vision tower that is not.
    """
    families = FAMILIES.get(config.model_type)
    if families is None:
        raise ValueError(unknown("family", config.model_type, FAMILIES))
    if not families[0].modalities:
        return families[0]
    tower = (config.audio_config if families[0].modalities == ("audio",) else config.vision_config).model_type
    for family in families:
        if tower in family.towers:
            return family
    raise ValueError(unknown("tower", tower, [name for family in families for name in family.towers]))


def unknown(what: str, model_type: str, known: Iterable[str]) -> str:
    """The refusal of a ``model_type`` that is none of those known."""
    return (
        f"the native engine does not run the {what} {model_type!r}{reason(model_type)}; it runs {', '.join(known)}"
    )
