"""A model's generation_config.json: end tokens, and default sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, Field, ValidationError

from epd_serve.types import SAMPLING_DEFAULTS, SamplingParams


class _Settings(BaseModel, strict=True):
    """The fields of generation_config.json that affect an answer."""

    eos_token_id: int | list[int] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    max_new_tokens: int | None = Field(None, ge=1, le=2**53)


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Default generation settings of a model.

    Attributes:
        defaults: sampling parameters by name.
        max_tokens: upper limit of any answer; None: no limit.
    """

    eos_token_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def complete(self, sampling: SamplingParams) -> SamplingParams:
        """Return ``sampling`` with the model's defaults for unset parameters."""
        changes: dict[str, Any] = {
            name: value
            for name, value in self.defaults.items()
            if getattr(sampling, name) == SAMPLING_DEFAULTS[name] and name not in sampling.neutral
        }
        return msgspec.structs.replace(sampling, **changes) if changes else sampling


def read_generation_config(path: Path, config: Any) -> GenerationConfig:
    """Read the generation settings of the model in ``path``. Raises ValueError for invalid values."""
    file = path / "generation_config.json"
    try:
        settings = _Settings.model_validate_json(file.read_bytes() if file.is_file() else b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        name = "".join(map(str, first["loc"][:1]))
        raise ValueError(f"{file}: {name} is {first['input']!r}: {first['msg']}") from error
    given = settings.model_dump(exclude_none=True)
    eos = given.pop("eos_token_id", getattr(config.get_text_config(), "eos_token_id", None))
    max_tokens = given.pop("max_new_tokens", None)
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return GenerationConfig(eos_token_ids=frozenset(ends), defaults=given, max_tokens=max_tokens)
