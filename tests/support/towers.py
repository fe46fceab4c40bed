"""Models with nothing but an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pictures import LIMITS

from epd_serve.instance.loading.checkpoint import CheckpointModel
from epd_serve.media.decoder_pool import DecoderPool


class TowerModel(CheckpointModel):
    """Loads a tower that is there already; its media are decoded in processes."""

    producer, torch_dtype = "", torch.float32

    def __init__(self, tower: Any, family: Any) -> None:
        self._tower, self.family = tower, family
        self.decoders = DecoderPool(cpu_s=2.0, limits=LIMITS)

    def tower(self, before_layer: Callable[[], None]) -> Any:
        return self._tower
