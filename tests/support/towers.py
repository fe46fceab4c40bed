"""Models of which an encoder is all there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pictures import LIMITS

from epd_serve.instance.loading.checkpoint import tower_inputs
from epd_serve.instance.loading.model import tensor_data
from epd_serve.media.decoder_pool import DecoderPool


class TowerModel:
    """Loads a tower that is there already; its media are decoded in processes."""

    producer = ""
    data_of = staticmethod(tensor_data)

    def __init__(self, tower: Any, family: Any) -> None:
        self._tower, self.family = tower, family
        self.decoders = DecoderPool(cpu_s=2.0, limits=LIMITS)
        self.prepare = partial(tower_inputs, self.decoders, family)

    def tower(self, before_layer: Callable[[], None]) -> Any:
        return self._tower
