"""A model's generation_config.json: what ends an answer, and the sampling of requests that leave it open."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from epd_serve.types import SAMPLING_DEFAULTS, SamplingParams

#: The least and the most of each; the least of those in _ABOVE is not reached.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "max_new_tokens": (1, 2**53),
}
_ABOVE = ("top_p", "repetition_penalty")
_WHOLE = ("top_k", "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The settings with which a model generates where a request leaves them open.

    Attributes:
        defaults: sampling parameters by name.
        max_tokens: the most that an answer may have, whatever a request asks for; None: no limit.
    """

    eos_token_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def complete(self, sampling: SamplingParams) -> SamplingParams:
        """Return ``sampling`` with the model's defaults for what its request left open."""
        changes: dict[str, Any] = {
            name: value
            for name, value in self.defaults.items()
            if getattr(sampling, name) == SAMPLING_DEFAULTS[name] and name not in sampling.neutral
        }
        return msgspec.structs.replace(sampling, **changes) if changes else sampling


def read_generation_config(path: Path, config: Any) -> GenerationConfig:
    """Read the generation settings of the model in ``path``. Raises ValueError for invalid values."""
    file = path / "generation_config.json"
    values = _read(file) if file.is_file() else {}
    eos = values.get("eos_token_id")
    if eos is None:
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int for token in ends):
        raise ValueError(f"{file}: eos_token_id is {eos!r}; it must be the number of a token, or a list of such")
    given = {name: _checked(file, name, values[name]) for name in _RANGES if values.get(name) is not None}
    max_tokens = given.pop("max_new_tokens", None)
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    return GenerationConfig(
        eos_token_ids=frozenset(ends),
        defaults=given,
        max_tokens=None if max_tokens is None else int(max_tokens),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: this is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: it must be a JSON object, and is a {type(values).__name__}")
    return values


def _checked(file: Path, name: str, value: Any) -> float:
    least, most = _RANGES[name]
    kinds = (int,) if name in _WHOLE else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (value == least and name in _ABOVE):
        raise ValueError(
            f"{file}: {name} is {value!r}; it must be {'an integer' if name in _WHOLE else 'a number'} "
            f"{'above' if name in _ABOVE else 'from'} {least:g}" + ("" if most == math.inf else f" to {most:g}")
        )
    number: float = value
    return number
