"""An instance that is to be ended gives up what it has, and serves on where it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny_models
from fleet import Books
from services import serving
from test_switching import MAX_TOKENS, answering, read, request, tokens

from epd_serve.errors import Conflict, ServeError, StageTimeout
from epd_serve.instance.leaving import Leaving
from epd_serve.protocol import wire


async def test_what_has_begun_goes_on_elsewhere_or_keeps_it_here(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(model, "PD", num_blocks=100) as instance:
        leaving = Leaving(instance)
        # two choices of a stream cannot go on elsewhere, and end when they end
        async with answering(instance, request("two", n=2)) as answer:
            with pytest.raises(StageTimeout, match="still something to do"):
                await leaving.leave(wire.LeaveOrder(deadline_s=0.05))
            assert instance.info().ready, "it serves on"
            cancelled = asyncio.create_task(leaving.leave(wire.LeaveOrder()))
            while not instance.draining:  # noqa: ASYNC110
                await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert instance.info().ready, "whoever ordered it is gone"
            assert len(tokens(await read(answer))) == 2 * MAX_TOKENS
        async with answering(instance, request("one")) as answer:
            left = await leaving.leave(wire.LeaveOrder(patience_s=0))
            assert 0 < len(tokens(await read(answer))) < MAX_TOKENS
        assert left.seconds < 30 and not instance.info().ready
        with pytest.raises(ServeError) as refused:
            instance.check_accepting()
        assert refused.value.code == "draining"
        assert (await leaving.leave(wire.LeaveOrder())).seconds < 30, "it is empty already"
        await Books({"i": instance.url}).check()


async def test_one_that_changes_its_role_stays(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("llava", tmp_path / "model")
    async with serving(model, "PD", num_blocks=100) as instance:
        async with answering(instance, request("two", n=2)) as answer:
            ordered = asyncio.create_task(instance.switching.order(wire.RoleOrder(role="P")))
            while instance.switching.machine.is_serving:  # noqa: ASYNC110
                await asyncio.sleep(0)
            with pytest.raises(Conflict, match="another role"):
                await Leaving(instance).leave(wire.LeaveOrder())
            ordered.cancel()
            await asyncio.gather(ordered, return_exceptions=True)
            await read(answer)
        assert instance.info().ready
