"""Facts about a vLLM instance that a caller needs and the instance itself cannot report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from epd_serve.types import Role


@dataclass(frozen=True, kw_only=True)
class VllmTarget:
    """A vLLM instance as the deployment file describes it; vLLM does not know its role.

    Attributes:
        ranks: tensor-parallel ones.
        features, kv: connectors that hand them on; None where nothing is handed on.
        pulls: whether D asks for KV only once P has answered, with the parameters in P's answer.
        rewrites: whether D gets E's description of a picture, and no pixels.
        continues: whether the rest of an answer, computed apart, equals the same part of the whole.
        recomputes: whether D computes a prompt whose KV does not come.
    """

    role: Role
    device: str
    dtype: str
    model_path: str
    ranks: int = 1
    features: Literal["store", "file"] | None = None
    kv: Literal["grouped", "mooncake", "nixl"] | None = None
    pulls: bool = False
    rewrites: bool = False
    continues: bool = True
    recomputes: bool = True

    @property
    def takes_features(self) -> bool:
        return self.features is not None and self.role.prefills and not self.role.encodes

    @property
    def media_fingerprint(self) -> str:
        """A hash of everything but the media that decides a feature."""
        return blake3(f"vllm {self.model_path} {self.dtype}".encode()).hexdigest()
