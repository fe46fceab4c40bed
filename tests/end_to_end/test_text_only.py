"""Models of text alone: P-D and EPD give ``generate``'s tokens, and an image is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from fleet import gateway
from http_client import http_client
from identity import QUESTIONS, start_fleet

from epd_serve.errors import InvalidRequest
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc.link import Link

PICTURED = next(question for question in QUESTIONS if question.images)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "llama" else [pytest.mark.slow]) for kind in tiny_models.TEXT_KINDS],
)
async def test_tokens_equal_generate_and_images_are_refused(kind: str, tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model(kind, tmp_path / kind)
    async with start_fleet(model, "P-D-EPD") as fleet:
        for names in (("p0", "d0"), ("epd0",)):
            await fleet.check_tokens(names)
        async with gateway(fleet.urls) as url, http_client(url) as client:
            refused = await client.post("/v1/chat/completions", json=PICTURED.body(stream=False, ignore_eos=True))
            async with Link("epd0", fleet.urls["epd0"]) as link:
                with pytest.raises(InvalidRequest, match="has nothing to encode"):
                    await link.ask("/role", [wire.encode(instance_state.RoleOrder(role="E"))])
            clip = {"type": "video_url", "video_url": {"url": "https://127.0.0.1/never-fetched.mp4"}}
            body = {"messages": [{"role": "user", "content": [clip]}]}
            no_video = await client.post("/v1/chat/completions", json=body)
    assert no_video.json()["error"]["message"] == "model 'tested' accepts no videos; it accepts text"
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "model 'tested' accepts no images; it accepts text"
