"""Streams whose instances die go on elsewhere; the client sees no seam."""

import asyncio
import json
from functools import partial

import pytest

from epd_serve.protocol import frames
from proxy.dispatch.dispatcher import MAX_ATTEMPTS

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
    async with gateway.session.get(f"{gateway.url}/metrics") as response:
        assert "epd_serve_request_continuations_total 1.0" in await response.text()


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

    error = frames.pack(frames.ERROR, (), b'data: {"error":{"message":"a step failed","type":"server_error"}}\n\n')
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


def of_choice(choice, number):
    return frames.pack(choice, (number,), b'data: {"token":%d}\n\n' % number)


async def test_several_choices_go_on_each_by_itself(start, kit):
    """The first of three has ended, the last has no token yet; another death on the way is one of one choice."""
    gateway = await start("a0:EPD", "a1:EPD", "a2:EPD", dashboard=True)
    whole = {0: [1, 2], 1: [11, 12, 13], 2: [21, 22]}
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d,"total_tokens":0}}\n\n'
    died = []

    def script(message):
        if message.sampling.n == 3:
            return [kit.FRAMES, *(of_choice(0, number) for number in whole[0]), of_choice(1, 11), kit.DIE]
        choice = message.sampling.first_choice
        assert message.output.first_index == choice and not died[2:]
        rest = whole[choice][len(message.generated) :]
        if choice == 1 and len(rest) == 2:
            died.append(message.generated)
            return [kit.FRAMES, of_choice(0, 12), kit.DIE]
        end = frames.pack(frames.END, (), usage % len(whole[choice]) + kit.DONE)
        return [kit.FRAMES, *(of_choice(0, number) for number in rest), end]

    for fake in gateway.fakes.values():
        fake.scripts["/stage/prefill"] = script
    status, answer = await gateway.answer(kit.chat(stream=True, n=3, stream_options={"include_usage": True}))
    *events, told, end = [line for line in answer.split(b"\n\n") if line]
    assert (status, end) == (200, b"data: [DONE]")
    numbers = [json.loads(line[6:])["token"] for line in events]
    assert {c: [n for n in numbers if n // 10 == c] for c in whole} == whole
    assert json.loads(told[6:])["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert died == [[11]]
    await gateway.settle()
    assert await counted(gateway) == (5, 7)


async def counted(gateway):
    """Tokens of prompt and answer of the only request, as the gateway has counted them."""
    await gateway.until(lambda: not gateway.admission.queue.num_in_flight)
    async with gateway.session.get(f"{gateway.url}/dashboard/data") as response:
        [shown] = (await response.json())["requests"]
    return shown["prompt_tokens"], shown["tokens"]


async def test_tokens_that_come_in_no_frames_are_those_that_the_answer_tells(start, kit):
    """P gives an empty answer in frames, as vLLM's does."""
    gateway = await start("p0:P", "d0:D", dashboard=True)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}\n\n'
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.FRAMES_THEN_DECODE]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [0.05, (200, {}), kit.FIRST, usage, kit.DONE]
    assert (await gateway.answer(kit.chat(stream=True)))[1] == kit.FIRST + usage + kit.DONE
    assert await counted(gateway) == (5, 3)


async def test_attempts_of_several_choices_are_bounded(start, kit):
    """The continuation of a choice is an attempt of the request, and not sent where the request has failed."""
    gateway = await start(*(f"a{i}:EPD" for i in range(14)))  # each choice avoids what failed another
    where = {}

    def script_of(name):
        def script(message):
            where.setdefault(message.sampling.first_choice if message.sampling.n == 1 else None, []).append(name)
            number = 1 + len(message.generated)
            frames = [of_choice(0, number), of_choice(1, 10 + number), of_choice(2, 20 + number)]
            return [kit.FRAMES, *frames[: message.sampling.n], kit.DIE]

        return script

    for name, fake in gateway.fakes.items():
        fake.scripts["/stage/prefill"] = script_of(name)
    answer = await gateway.raw(kit.chat(stream=True, n=3))
    assert answer.count(b'data: {"error"') == 1 and b"[DONE]" not in answer
    (first,) = where.pop(None)
    for names in where.values():
        assert first not in names and len(set(names)) == len(names) < MAX_ATTEMPTS
    assert max(map(len, where.values())) == MAX_ATTEMPTS - 1
    await gateway.settle()


async def test_several_choices_with_usage_in_each_event_end_in_an_error_event(start, kit):
    gateway = await start("a0:EPD", "a1:EPD")
    for name in ("a0", "a1"):
        gateway[name].scripts["/stage/prefill"] = lambda _: [kit.FRAMES, kit.frame(1), kit.DIE]
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await gateway.raw(kit.chat(stream=True, n=2, stream_options=options))
    assert b'data: {"error"' in answer and b"[DONE]" not in answer and not answer.endswith(b"0\r\n\r\n")
    assert sum(len(gateway[name].calls) for name in ("a0", "a1")) == 1
    await gateway.settle()


async def test_attempts_are_bounded(start, kit):
    gateway = await start(*(f"a{i}:EPD" for i in range(8)))
    for fake in gateway.fakes.values():
        fake.scripts["/stage/prefill"] = lambda message: [
            kit.FRAMES,
            kit.frame(len(message.generated) + 1),
            kit.DIE,
        ]
    answer = await gateway.raw(kit.chat(stream=True))
    assert answer.count(b'{"token"') == MAX_ATTEMPTS and answer.count(b'{"error"') == 1
    await gateway.settle()


async def test_an_instance_that_is_started_again_is_waited_for(start, kit):
    """The only D is lost; the one that comes up in its place has another process id."""
    gateway = await start("p0:P", "d0:D")
    gateway["p0"].scripts["/stage/prefill"] = prefill(kit)
    decode(kit, gateway, "d0", until=3, end=[kit.DIE])
    asking = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: bool(gateway["d0"].calls))
    gateway["d0"].loading = True
    await gateway.until(lambda: not gateway.table["d0"].ready)
    await asyncio.sleep(0.2)
    assert not asking.done()
    decode(kit, gateway, "d0")
    gateway["d0"].info["pid"] = 2
    gateway["d0"].loading = False
    assert tokens_of((await asking)[1]) == list(TOKENS)
