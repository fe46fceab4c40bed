"""Greedy float32 tokens equal transformers' ``generate``: every family and topology, batched, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import pytest_asyncio
import tiny_models
from fleet import FLEET, TOPOLOGIES, gateway
from http_client import http_client
from identity import CHATS, Fleet, start_fleet

from epd_serve.demo import weights_dir
from epd_serve.errors import InvalidRequest
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc.link import Link

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Tried each time, in these topologies; the rest takes long. Other files hold Qwen2.5-VL, sounds and texts against
#: ``generate``.
USUAL, FEW, FEW_LINE = "qwen3_vl", ("EPD", "E-P-D", "ED-P"), "E-P-ED-EPD-D"
#: Of pictures that are tiles or rows, and of sounds.
SPLITS = ("EPD", "EP-D", "E-P-D", "(E-P)-D")
OTHERS = (*tiny_models.FAMILY_KINDS, *tiny_models.AUDIO_KINDS)
ALL = [one for one in TOPOLOGIES if "E" in one]
SLOW = dict.fromkeys([USUAL, "qwen2_5_vl", "demo", "llava", *tiny_models.STATE_KINDS, *OTHERS])
#: Of a model that takes text alone.
TEXT_FLEET = ("llama", "P-D-EPD")
#: As Qwen3.5: they think, and call tools as XML.
THINKING = [f"{kind}, thinking" for kind in tiny_models.STATE_KINDS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A model's instances of a topology."""
    kind, line = request.param
    if kind == "demo":
        path = weights_dir()
    else:
        name, _, thinks = kind.partition(", ")
        path = tmp_path_factory.mktemp("fleet") / name
        tiny_models.make_tiny_model(name, path, thinks=bool(thinks))
    async with start_fleet(path, line, ignore_eos=kind != "demo") as fleet:
        if kind in OTHERS:
            assert all(len(set(answer)) >= 5 for answer in fleet.expected.values()), "answers that say little"
        yield fleet


#: Fleets, the topologies of each, and marks.
CASES: list[tuple[tuple[str, str], Iterable[str], Any]] = [
    ((USUAL, FEW_LINE), FEW, ()),
    *(((kind, FLEET), SPLITS if kind in OTHERS else ALL, pytest.mark.slow) for kind in SLOW),
    *(((kind, FLEET), ("EPD", "E-P-D", "(E-PD)"), pytest.mark.slow) for kind in THINKING),
    (TEXT_FLEET, ("P-D", "EPD"), ()),
    *(((kind, TEXT_FLEET[1]), ("P-D", "EPD"), pytest.mark.slow) for kind in tiny_models.TEXT_KINDS),
]


@pytest.mark.parametrize(
    ("fleet", "topology"),
    [
        pytest.param(fleet, one, id=f"{'all-' if marks else ''}{fleet[0]}-{one}", marks=marks)
        for fleet, topologies, marks in CASES
        for one in topologies
    ],
    indirect=["fleet"],
    scope="module",  # that of the fleet: without it, that of a test
)
async def test_tokens_equal_generate(fleet: Fleet, topology: str) -> None:
    await fleet.check_tokens(TOPOLOGIES[topology])


@pytest.mark.parametrize("fleet", [TEXT_FLEET], indirect=True, scope="module", ids=["text"])
async def test_a_model_of_text_alone_refuses_what_is_to_be_encoded(fleet: Fleet) -> None:
    async with gateway(fleet.urls) as url, http_client(url) as client:
        for kind, source in (
            ("image", "data:image/png;base64,AAAA"),
            ("video", "https://127.0.0.1/never-fetched.mp4"),
        ):
            part = {"type": f"{kind}_url", f"{kind}_url": {"url": source}}
            answer = await client.post(CHATS, json={"messages": [{"role": "user", "content": [part]}]})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == f"model 'tested' accepts no {kind}s; it accepts text"
    async with Link("epd0", fleet.urls["epd0"]) as link:
        with pytest.raises(InvalidRequest, match="has nothing to encode"):
            await link.ask("/role", [wire.encode(instance_state.RoleOrder(role="E"))])
