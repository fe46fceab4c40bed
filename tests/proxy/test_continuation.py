"""Streams whose instances die go on elsewhere; the client sees no seam."""

import asyncio
import json
from functools import partial

import pytest

from epd_serve.backends import native
from epd_serve.rpc import items

TOKENS = range(1, 7)


def tokens_of(answer):
    """The tokens that a client got, without the end."""
    lines = [line for line in answer.split(b"\n\n") if line]
    assert lines.pop() == b"data: [DONE]"
    return [json.loads(line[6:])["token"] for line in lines]


def prefill(kit, *after):
    """P gives the token behind those that are there, or the end where they are all."""
    return lambda message: (
        [kit.FRAMES, kit.frame(0, end=True)]
        if len(message.generated) == len(TOKENS)
        else [kit.FRAMES_THEN_DECODE, kit.frame(len(message.generated) + 1), *after]
    )


def decode(kit, gateway, name, *, until=None, end=()):
    """D goes on behind P's token, up to ``until``, then with ``end``."""

    def asked(message):
        calls = {one.request_id: one for fake in gateway.fakes.values() for one in fake.got("/stage/prefill")}
        return calls.get(message.request_id)

    def tokens(message):
        start = len(asked(message).generated) + 2
        return b"".join(kit.frame(number) for number in range(start, (until or TOKENS[-1]) + 1))

    def script(message):
        is_asked = partial(gateway.until, partial(asked, message))  # the prefill call may come after this one
        return [is_asked, 0.05, kit.FRAMES, lambda: tokens(message), *(end if until else [kit.frame(0, end=True)])]

    gateway[name].scripts["/stage/decode"] = script


@pytest.mark.parametrize("until", [1, 3, 6])
async def test_d_that_dies_is_replaced_in_the_middle(start, kit, until):
    gateway = await start("p0:P", "d0:D", "d1:D")
    gateway["p0"].scripts["/stage/prefill"] = prefill(kit)
    half = kit.frame(until + 1)[:-3]
    decode(kit, gateway, "d0", until=until, end=[half, kit.DIE])
    decode(kit, gateway, "d1")
    assert tokens_of((await gateway.answer(kit.chat(stream=True)))[1]) == list(TOKENS)
    first, second = gateway["p0"].got("/stage/prefill")
    assert (first.generated, second.generated) == ([], list(range(1, until + 1)))
    assert (first.output, first.sampling) == (second.output, second.sampling)
    assert second.decode_url == gateway["d1"].url != first.decode_url
    await gateway.settle()
    assert "epd_serve_request_continuations_total 1.0" in await gateway.text("/metrics")


async def test_p_that_dies_between_its_token_and_the_hand_over_is_replaced(start, kit):
    gateway = await start("p0:P", "p1:P", "d0:D")
    gateway["p0"].scripts["/stage/prefill"] = prefill(kit, 0.05, kit.DIE)
    gateway["p1"].scripts["/stage/prefill"] = prefill(kit)
    gateway["d0"].scripts["/stage/decode"] = lambda message: (
        [kit.FOREVER]
        if message.request_id.endswith("-1")
        else [0.05, kit.FRAMES, *map(kit.frame, TOKENS[2:]), kit.frame(0, end=True)]
    )
    assert tokens_of((await gateway.answer(kit.chat(stream=True)))[1]) == list(TOKENS)
    assert gateway["p1"].got("/stage/prefill")[0].generated == [1]
    await gateway.until(lambda: len(gateway["d0"].cancelled) == 1)
    await gateway.settle()


@pytest.mark.parametrize("end", ["DIE", "error", "clean"])
async def test_one_instance_for_all_is_replaced_however_it_ends(start, kit, end):
    """Tokens that came together with the error event are not lost."""
    gateway = await start("a0:EPD", "a1:EPD")
    error = items.pack(items.ERROR, (), b'data: {"error":{"message":"a step failed","type":"server_error"}}\n\n')
    tail = {"DIE": [kit.DIE], "error": [kit.frame(3) + error, kit.DIE], "clean": []}[end]
    for name in ("a0", "a1"):
        gateway[name].scripts["/stage/prefill"] = lambda message: (
            [kit.FRAMES, *map(kit.frame, TOKENS[len(message.generated) :]), kit.frame(0, end=True)]
            if message.generated
            else [kit.FRAMES, kit.frame(1), kit.frame(2), *tail]
        )
    assert tokens_of((await gateway.answer(kit.chat(stream=True)))[1]) == list(TOKENS)
    calls = gateway["a0"].got("/stage/prefill") + gateway["a1"].got("/stage/prefill")
    assert sorted(call.generated for call in calls) == [[], [1, 2, 3] if end == "error" else [1, 2]]
    await gateway.settle()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_stream_of_several_choices_moves_only_before_its_first_text(start, kit, begun):
    """A token whose text is held back begins no answer."""
    gateway = await start("a0:EPD", "a1:EPD")
    first = kit.frame(1) if begun else items.pack(0, (7,), b"")
    whole = [kit.FRAMES, kit.frame(1), kit.frame(2), kit.frame(0, end=True)]
    scripts, asked = [[kit.FRAMES, first, 0.05, kit.DIE], whole], []
    for fake in gateway.fakes.values():
        fake.scripts["/stage/prefill"] = lambda message: asked.append(message.generated) or scripts.pop(0)
    answer = await gateway.raw(kit.chat(stream=True, n=2))
    assert (b'"choices_lost"' in answer) is begun and (b"data: [DONE]" in answer) is not begun
    assert answer.count(b'{"token":1}') == 1 and asked == [[]] * (2 - begun)
    await gateway.settle()


async def test_unknown_tokens_of_answers_come_from_usage(start, kit, monkeypatch):
    """P gives an empty answer, as vLLM's does."""
    monkeypatch.setattr(native._StageCall, "knows_tokens", False)
    gateway = await start("p0:P", "d0:D")
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}\n\n'
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.FRAMES_THEN_DECODE]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [
        0.05,
        (200, {}),
        b"".join(items.pack(0, (), event) for event in (kit.FIRST, usage)),
        kit.sent(kit.DONE),
    ]
    assert (await gateway.answer(kit.chat(stream=True)))[1] == kit.FIRST + usage + kit.DONE
    await gateway.until(lambda: not gateway.admission.queue.num_in_flight)
    [shown] = json.loads(await gateway.text("/dashboard/data"))["requests"]
    assert (shown["prompt_tokens"], shown["tokens"]) == (5, 3)


async def test_an_instance_that_is_started_again_is_waited_for(start, kit):
    """The only D is lost; the one that comes up in its place has another process id."""
    gateway = await start("p0:P", "d0:D")
    gateway["p0"].scripts["/stage/prefill"] = prefill(kit)
    decode(kit, gateway, "d0", until=3, end=[kit.DIE])
    asking = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: bool(gateway["d0"].calls))
    gateway["d0"].loading = True
    await gateway.until(lambda: not gateway.table["d0"].ready)
    decode(kit, gateway, "d0")
    gateway["d0"].info["pid"] = 2
    gateway["d0"].loading = False
    assert tokens_of((await asking)[1]) == list(TOKENS)
