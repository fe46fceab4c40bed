"""An answer goes on at another decode instance with its KV as if it had stayed; failures give the blocks back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_models
from emulated import EMULATED, little_memory
from fleet import Books
from frame_bodies import whole_frames
from services import language_of, serving
from stage_requests import Frame, request, without_logprobs

from epd_serve.engine.engine import EngineEvent, TokenEvent
from epd_serve.errors import DECODE_DRAINING, DRAINING, KV_HELD, ServeError, Unavailable
from epd_serve.instance import migration as migration_module
from epd_serve.instance.http import Reply
from epd_serve.instance.instance import Instance
from epd_serve.launch.processes.ports import free_port
from epd_serve.protocol import frames, wire
from epd_serve.rpc.streams import BrokenStream
from epd_serve.types import Grammar


async def read(reply: Reply) -> list[Frame]:
    """All of an answer, or what there is of one that breaks off."""
    body = reply.body
    try:
        if reply.stream is not None:
            async for piece in reply.stream:
                body += piece
    except BrokenStream:
        pass
    if reply.on_close is not None:
        reply.on_close()
    return whole_frames(body)


@dataclass
class Fleet:
    prefill: Instance
    source: Instance
    target: Instance
    count: int = 0

    async def begin(self, wanted: wire.PrefillRequest, *, leave_after: int | None = None) -> tuple[str, Reply]:
        """An answer that the source decodes, all of it or for so many tokens; and its name."""
        self.count += 1
        wanted = msgspec.structs.replace(
            wanted, request_id=f"r{self.count}", decode_url=self.source.url, sampling=wanted.sampling
        )
        if leave_after is not None:
            self.leave_after(leave_after)
        expect = wire.DecodeRequest(wanted.request_id, stream=wanted.output.stream)
        decoding = asyncio.create_task(self.source.language.decode.decode(expect))
        first = await read(await self.prefill.language.prefill.prefill(wanted))
        reply = await decoding
        return wanted.request_id, msgspec_reply(first, reply)

    def leave_after(self, num_tokens: int) -> None:
        """The source gives its answers up behind a token of them: its engine waits for that."""
        language, loop, given_up = language_of(self.source), asyncio.get_running_loop(), threading.Event()
        emit, told = language.emit, 0

        def give_up() -> None:
            language.send_away(begun=True, late=False)
            given_up.set()

        def emit_and_wait(events: list[EngineEvent]) -> None:
            nonlocal told
            emit(events)
            told += sum(isinstance(event, TokenEvent) for event in events)
            if told >= num_tokens:
                language.emit = emit  # type: ignore[method-assign]
                loop.call_soon_threadsafe(give_up)
                assert given_up.wait(60)

        language.emit = emit_and_wait  # type: ignore[method-assign]

    async def move(self, held: str, **more: Any) -> tuple[list[Frame], Reply | None]:
        """The source's view of the hand-over, and the target's answer, where it comes."""
        name = f"{held}-moved"
        order = wire.MoveRequest(name, held, **({"decode_url": self.target.url} | more))
        expect = wire.DecodeRequest(name, stream=True)
        decoding = asyncio.create_task(self.target.language.decode.decode(expect))
        try:
            said = await read(await language_of(self.source).migrations.move(order))
        except BaseException:
            decoding.cancel()
            raise
        if said:
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)
            return said, None
        return said, await decoding

    async def check(self) -> None:
        await Books({name: getattr(self, name).url for name in ("prefill", "source", "target")}).check()


def msgspec_reply(first: list[Frame], rest: Reply) -> Reply:
    """Both as one."""

    async def stream() -> Any:
        yield b"".join(frames.pack(*frame) for frame in first)
        if rest.stream is not None:
            async for piece in rest.stream:
                yield piece

    return Reply(stream=stream(), on_close=rest.on_close)


@asynccontextmanager
async def fleet(
    path: Path, target: str = "D", kv_mode: str = "grouped", device: str = "cpu", **options: Any
) -> AsyncIterator[Fleet]:
    async with (
        serving(path, "EP", device=device) as prefill,
        serving(path, "D", kv_transfer={"mode": kv_mode}, name="source", device=device) as source,
        serving(path, target, **({"name": "target", "device": device} | options)) as second,
    ):
        with little_memory(device, 1.5):
            yield Fleet(prefill, source, second)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("tiny") / "model")


#: Of which an answer has some tens of tokens, whatever the model would say.
SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 9, "maxItems": 9}


@pytest.mark.parametrize(
    ("kv_mode", "target", "device", "num_kinds"),
    [
        ("grouped", "D", "cpu", 4),
        ("pull", "PD", "cpu", 4),
        ("grouped", "D", EMULATED, 1),
        pytest.param("grouped", "D", EMULATED, 4, marks=pytest.mark.slow),
        pytest.param("pull", "PD", EMULATED, 4, marks=pytest.mark.slow),
    ],
)
async def test_it_goes_on_as_if_it_had_stayed(
    model: Path, kv_mode: str, target: str, device: str, num_kinds: int
) -> None:
    async with fleet(model, target, kv_mode, device) as here:
        wanted = [
            request(temperature=0.0, max_tokens=40),
            request(temperature=1.5, presence_penalty=0.5, frequency_penalty=1.0, min_tokens=5),
            request("completion", temperature=1.5, logprobs=2, repetition_penalty=1.3),
            request(
                temperature=1.5,
                max_tokens=200,
                ignore_eos=False,
                grammar=Grammar(kind="json", text=json.dumps(SCHEMA), param="response_format"),
            ),
        ]
        for one in wanted[:num_kinds]:
            _, reply = await here.begin(one)
            whole = await read(reply)
            assert whole[-1][0] == frames.END
            for count in (1, 3, 17):
                name, reply = await here.begin(one, leave_after=count)
                *before, broken = await read(reply)
                assert broken[0] == frames.ERROR and json.loads(broken[2][6:])["error"]["code"] == KV_HELD
                assert len(before) >= 1 + count
                said, rest = await here.move(name, num_generated=sum(len(ids) for _, ids, _ in before))
                assert not said and rest is not None
                assert without_logprobs(before + await read(rest)) == without_logprobs(whole), (one, count)
        await here.check()


async def test_an_answer_in_one_piece_takes_its_log_probabilities_along(model: Path) -> None:
    """Those of the prompt, which P has told, and of the tokens that the source has computed."""
    one = request("completion", temperature=0.0, logprobs=2)
    one = msgspec.structs.replace(one, output=msgspec.structs.replace(one.output, stream=False, echo=True))
    async with fleet(model) as here:

        async def begin(name: str) -> asyncio.Task[Reply]:
            expect = wire.DecodeRequest(name, stream=False)
            decoding = asyncio.create_task(here.source.language.decode.decode(expect))
            wanted = msgspec.structs.replace(one, request_id=name, decode_url=here.source.url)
            assert await read(await here.prefill.language.prefill.prefill(wanted)) == []
            return decoding

        stayed = await (await begin("stays"))
        whole = json.loads(stayed.body)["choices"][0]
        assert len(whole["logprobs"]["tokens"]) == len(whole["logprobs"]["token_logprobs"]) > 40
        here.leave_after(9)
        with pytest.raises(ServeError) as refused:
            await (await begin("moves"))
        assert refused.value.code == KV_HELD
        order = wire.MoveRequest("moved", "moves", here.target.url)
        decoding = asyncio.create_task(
            here.target.language.decode.decode(wire.DecodeRequest("moved", stream=False))
        )
        assert await read(await language_of(here.source).migrations.move(order)) == []
        moved = await decoding
        told = json.loads(moved.body)["choices"][0]
        first, *others = told["logprobs"]["token_logprobs"]
        assert first is None and None not in others
        assert others == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-4)
        assert (told["text"], told["logprobs"]["tokens"]) == (whole["text"], whole["logprobs"]["tokens"])
        for reply in (stayed, moved):
            assert reply.on_close is not None
            reply.on_close()
        await here.check()


async def test_what_fails_gives_the_blocks_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = request(temperature=0.0, max_tokens=200)
    async with fleet(model, num_blocks=12) as here:
        migrations = language_of(here.source).migrations

        async def hold() -> str:
            name, reply = await here.begin(one, leave_after=1)
            assert (await read(reply))[-1][0] == frames.ERROR and migrations.holds(name)
            assert here.source.in_use()["blocks"]
            return name

        with pytest.raises(Unavailable, match="KV blocks") as refused:  # 12 are too few: not the client's fault
            await here.move(await hold())
        assert refused.value.code == DRAINING
        with pytest.raises(ServeError):  # nobody is there
            await here.move(await hold(), decode_url=f"http://127.0.0.1:{free_port('127.0.0.1')}")
        with pytest.raises(ServeError) as refused:  # it does not decode
            await here.move(await hold(), decode_url=here.prefill.url)
        assert refused.value.code == DECODE_DRAINING
        with pytest.raises(Unavailable):  # its context is too short
            await here.move(await hold(), max_model_len=100)
        with pytest.raises(Unavailable):
            await here.move("nobody")
        with pytest.raises(Unavailable) as refused:  # its client lacks tokens that the other would not give again
            await here.move(await hold(), num_generated=0)
        assert refused.value.code == DRAINING
        await here.check()

        name = await hold()
        language_of(here.source).send_away(begun=True, late=True)
        assert not migrations.holds(name)
        await here.check()

        monkeypatch.setattr(migration_module, "_UNCLAIMED_S", 0.0)
        await hold()
        await here.check()
        assert here.source.info().ready


async def test_a_hand_over_that_fails_is_told_and_gives_the_blocks_back(model: Path) -> None:
    async with fleet(model) as here:
        name, reply = await here.begin(request(temperature=0.0, max_tokens=200), leave_after=1)
        await read(reply)
        move = await language_of(here.source).migrations.move(wire.MoveRequest("moved", name, here.target.url))
        assert here.target.in_use()["reservations"] == 1
        [transfer_id] = here.target.language.decode._reservations._live
        here.target.language.decode.cancel(wire.TransferRef(transfer_id, "moved"))
        [(label, _, said)] = await read(move)
        assert label == frames.ERROR and json.loads(said[6:])["error"]["type"]
        await here.check()
