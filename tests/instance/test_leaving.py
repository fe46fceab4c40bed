"""An instance that is to be ended gives up what it has, and serves on where it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tiny_models
from fleet import Books
from in_process import answering, held, serving
from item_bodies import whole_items

from epd_serve.errors import Conflict, InstanceLost, ServeError, StageTimeout
from epd_serve.instance import lifecycle as lifecycle_module
from epd_serve.instance.lifecycle import SwitchState
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc.link import LinkCall
from epd_serve.types import SamplingParams

MAX_TOKENS = 200


def request(name: str, *, can_move: bool) -> bytes:
    """A stream; one of two choices can only end where it is."""
    return wire.encode(
        wire.PrefillRequest(
            request_id=name,
            output=wire.OutputOptions("completion", "r", 0, "tiny", stream=True),
            sampling=SamplingParams(
                seed=7, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0, n=1 if can_move else 2
            ),
            items=[],
            prompt="apple banana cherry",
        )
    )


async def num_tokens(answer: LinkCall) -> int:
    """Until the end, or until the connection is cut."""
    body = b""
    try:
        async for chunk in answer.chunks():
            body += chunk
    except InstanceLost:
        pass
    return sum(len(ids) for _, ids, _ in whole_items(body))


async def test_what_has_begun_goes_on_elsewhere_or_keeps_it_here(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(model, "PD", num_blocks=100) as instance:
        lifecycle = instance.lifecycle
        async with answering(instance, request("two", can_move=False)) as answer, held(instance):
            with pytest.raises(StageTimeout, match="still something to do"):
                await lifecycle.leave(instance_state.LeaveOrder(deadline_s=0.05))
            assert instance.info().ready, "it serves on"
            cancelled = asyncio.create_task(lifecycle.leave(instance_state.LeaveOrder()))
            while not instance.lifecycle.is_leaving:  # noqa: ASYNC110
                await asyncio.sleep(0)
            with pytest.raises(Conflict, match="leaving already"):
                await lifecycle.leave(instance_state.LeaveOrder())
            with pytest.raises(Conflict, match="leaving"):
                await instance.lifecycle.switch(instance_state.RoleOrder(role="P"))
            assert instance.lifecycle.is_leaving
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert instance.info().ready, "whoever ordered it is gone"
            assert await num_tokens(answer) == 2 * MAX_TOKENS
        async with answering(instance, request("one", can_move=True)) as answer:
            left = await lifecycle.leave(instance_state.LeaveOrder(patience_s=0))
            assert 0 < await num_tokens(answer) < MAX_TOKENS
        assert left.seconds < 30 and not instance.info().ready
        with pytest.raises(ServeError) as refused:
            instance.check_accepting()
        assert refused.value.code == "draining"
        assert (await lifecycle.leave(instance_state.LeaveOrder())).seconds < 30, "it is empty already"
        await Books({"i": instance.url}).check()


async def test_one_that_changes_its_role_stays(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("llava", tmp_path / "model")
    async with serving(model, "PD", num_blocks=100) as instance:
        async with held(instance):
            ordered = asyncio.create_task(instance.lifecycle.switch(instance_state.RoleOrder(role="P")))
            while instance.lifecycle.state is SwitchState.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0)
            with pytest.raises(Conflict, match="another role"):
                await instance.lifecycle.leave(instance_state.LeaveOrder())
            ordered.cancel()
            await asyncio.gather(ordered, return_exceptions=True)
        assert instance.info().ready


async def test_one_that_nobody_ends_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.make_tiny_model("llava", tmp_path / "model")
    monkeypatch.setattr(lifecycle_module, "_EMPTY_S", 0.05)
    async with serving(model, "PD", num_blocks=100) as instance, asyncio.timeout(300):
        await instance.lifecycle.leave(instance_state.LeaveOrder())
        assert not instance.info().ready
        while not instance.info().ready:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        instance.check_accepting()
        await instance.lifecycle.leave(instance_state.LeaveOrder())
        await instance.drained()
        while instance.lifecycle._empty is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(ServeError, match="being shut down"):
            instance.check_accepting()
