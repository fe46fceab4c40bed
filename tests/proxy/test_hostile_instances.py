"""Instances that say what none can say, or answer without end: they are left out, and clients hear of others."""

import asyncio
import itertools
import json
import math

import aiohttp
import msgspec
import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from instance_info import instance_info

from epd_serve.protocol import instance_state, wire
from epd_serve.routing.table import InstanceTable
from epd_serve.rpc import items
from epd_serve.types import StageRate

MIB = 1024**2
PIECE = b"x" * 65536


Load = instance_state.Load


async def test_a_poisoned_report_isolates_its_sender_and_fails_no_client(start, kit):
    gateway = await start("p0:P", "p1:P", "d0:D", reporting=True)
    gateway["p1"].report = lambda: instance_state.Report(load=Load(rates={"P": StageRate(1e300, 1e300)}))
    await gateway.until(lambda: not gateway.table["p1"].ready)
    gateway["p1"].calls.clear()
    before = gateway["p1"].num_asked
    while gateway["p1"].num_asked < before + 4:  # it says that it is ready each time that it is asked
        assert (await gateway.answer(kit.chat()))[0] == 200
    assert not gateway["p1"].got("/stage/prefill")
    gateway["p1"].report = lambda: instance_state.Report(load=Load())
    await gateway.until(lambda: gateway.table["p1"].ready)


async def test_an_invalid_info_is_ignored(start, kit):
    gateway = await start("a0:EPD", "a1:EPD")
    gateway["a1"].info["tokens_per_pixel"] = 1e300
    await gateway.until(lambda: not gateway.table["a1"].ready)
    info = gateway.table["a1"].info
    assert info is not None and info.tokens_per_pixel == 0.0
    assert [(await gateway.answer(kit.chat()))[0] for _ in range(4)] == [200] * 4
    assert not gateway["a1"].got("/stage/prefill")
    del gateway["a1"].info["tokens_per_pixel"]
    await gateway.until(lambda: gateway.table["a1"].ready)


@pytest.mark.parametrize("note", ["7;0;4", '{"num_tokens":-1}', "\xff"])
async def test_a_note_that_cannot_be_read_is_ignored(start, kit, note):
    gateway = await start("pd0:PD")
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [
        (200, {wire.NEXT_HEADER: "none", wire.PROMPT_NOTE_HEADER: note}),
        kit.WHOLE,
    ]
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    assert 'endpoint="chat",modality="text",status="200"} 1.0' in await gateway.text("/metrics")


async def test_an_answer_without_end_is_cut_off_and_asked_for_elsewhere(start, kit):
    gateway = await start("a0:EPD", "a1:EPD")
    gateway["a0"].scripts["/stage/prefill"] = lambda _: itertools.chain([kit.NONE], itertools.cycle([PIECE, 0.0]))
    before, peak = psutil.Process().memory_info().rss, 0
    for _ in range(4):
        asked = asyncio.create_task(gateway.answer(kit.chat(max_tokens=16)))
        while not asked.done():
            await asyncio.sleep(0.005)
            peak = max(peak, psutil.Process().memory_info().rss)
        assert await asked == (200, kit.WHOLE)
    assert gateway["a0"].got("/stage/prefill") and len(gateway["a1"].got("/stage/prefill")) == 4
    assert peak - before < 48 * MIB
    await gateway.settle()


@pytest.mark.parametrize("tokens", [(7,), ()])
async def test_a_stream_without_end_ends_where_its_tokens_must_have(start, kit, tokens):
    gateway = await start("a0:EPD")
    piece = items.pack(0, tokens, b'data: {"token":"' + b"x" * 8000 + b'"}\n\n')
    gateway["a0"].scripts["/stage/prefill"] = lambda _: itertools.chain(
        [kit.FRAMES], itertools.cycle([piece, 0.0])
    )
    async with asyncio.timeout(300):
        async with gateway.post(kit.chat(stream=True, max_tokens=16)) as response:
            got = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                async for chunk in response.content.iter_any():
                    got += chunk
    assert response.status == 200
    assert b"more bytes than the request allows" in got[-2000:]
    assert len(got) < 4 * MIB


NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20), st.floats(), st.sampled_from([0, 1, 1e308, 5e-324, -0.0, 10**12, 1e12])
)


@example({"total_blocks": 1}, {}, "E")  # no block is free, and nobody holds one
@given(
    st.dictionaries(st.sampled_from(instance_state.Load.__struct_fields__[:-1]), NUMBERS, max_size=6),
    st.dictionaries(
        st.sampled_from("EPD"),
        st.fixed_dictionaries({"base_s": NUMBERS, "unit_s": NUMBERS}, optional={"is_fresh": st.booleans()}),
    ),
    st.sampled_from(["E", "P", "D", "PD", "EPD"]),
)
@settings(max_examples=300, deadline=None)
def test_routing_accepts_every_valid_report(load, rates, role):
    text = json.dumps({"load": {**load, "rates": rates}}).encode()
    try:
        report = msgspec.json.decode(text, type=instance_state.Report)
    except msgspec.MsgspecError:
        return
    table = InstanceTable([("x0", "http://a:1"), ("y0", "http://a:2")])
    for name in ("x0", "y0"):
        table.update(name, instance_info(name, role, block_size=16))
    table.report("x0", report)
    for record in table:
        known = [record.prefill_s, record.encode_s, record.room_s(100), record.costs.decode_s(1.0, 100.0)]
        assert all(math.isfinite(seconds) and seconds >= 0 for seconds in known)
    assert round(1e6 * report.load.tokens_per_character) >= 0
