"""Against a deployment of ours: pictures and text, and what the gateway tells of itself."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import deployed
from load_tester import session, settings
from PIL import Image

from epd_serve.bench.types import Item, Media, Message


def picture(shade: int) -> Media:
    data = io.BytesIO()
    Image.new("RGB", (56, 56), (shade, 0, 255 - shade)).save(data, "PNG")
    return Media(mime="image/png", data=data.getvalue())


@dataclass(frozen=True)
class Mixed:
    """Every second request has a picture, and there are two of them."""

    num_items: int
    name: str = "mixed"

    def items(self, seed: int) -> Iterator[Item]:
        for index in range(self.num_items):
            text = f"What colour is this? {index}"
            parts = (picture(100 * (index // 2 % 2)), text) if index % 2 else (text,)
            yield Item(
                index=index,
                messages=(Message(role="user", parts=parts),),
                max_tokens=8,
                workload=self.name,
                modality="image" if index % 2 else "text",
                fields={"ignore_eos": True},
            )


@pytest.mark.asyncio
async def test_runs_record_our_gateways_topology_and_version(tmp_path: Path) -> None:
    async with deployed("E-PD") as deployment:
        wanted = settings(deployment.gateway_url, "closed:1", None, timeout_s=60.0, num_warmups=1)
        run = await asyncio.to_thread(session().run, tmp_path / "run", wanted, Mixed(12))
    assert run.total.num_failed == 0
    assert run.settings.topology == "E-PD"
    assert run.settings.versions["server"].startswith("epd-serve ")
    assert {record.modality: record.num_output_tokens for record in run.records} == {"image": 8, "text": 8}
