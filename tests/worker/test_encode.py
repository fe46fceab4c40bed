"""The encode loop survives whatever a batch fails with."""

from __future__ import annotations

import io

import pytest
import torch
from pictures import noise, png
from PIL import Image

from epd_serve.errors import InstanceFailed
from epd_serve.media import MediaLimits
from epd_serve.models.family import TowerInputs
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.worker.encode import EncodeService


class Family:
    def preprocess(self, image: Image.Image) -> TowerInputs:
        return {"pixel_values": torch.zeros(1, 1)}


class Tower:
    """Fails once as no list of exceptions foresees, and once with too few features."""

    calls = 0

    def encode(self, batch: list[TowerInputs]) -> list[torch.Tensor]:
        self.calls += 1
        if self.calls == 1:
            raise KeyError("image_sizes")
        return [torch.ones(2, 3) for _ in batch][self.calls == 2 :]


class Peers:
    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        return b""


async def test_a_batch_that_fails_takes_no_other_along() -> None:
    transport = EmbeddedTransport(path="shm")
    store = EmbeddedFeatureStore(transport, 1 << 12)
    tower = Tower()
    service = EncodeService(
        lambda: tower,
        Family(),
        store,
        Peers(),
        image_budget_pixels=1,
        limits=MediaLimits(),  # type: ignore[arg-type]
    )
    data = png(noise(1))
    width, height = Image.open(io.BytesIO(data)).size
    request = wire.EncodeRequest("r", wire.MediaRef("h" * 64, width, height), data, "http://p")
    for _ in range(2):
        with pytest.raises(InstanceFailed, match="the encoder failed"):
            await service.encode(request)
    assert (await service.encode(request)).num_tokens == 2
    assert store.num_owners == service.num_waiting == 0
    await service.close()
    transport.close()
