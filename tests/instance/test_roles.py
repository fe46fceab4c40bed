"""An instance changes its role, or leaves: its work goes on elsewhere, and whatever fails, it serves."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from chips import CHIP, little_memory
from fleet import Books
from in_process import answering, held, serving
from item_bodies import whole_items
from program import until, wait_until
from prompts import completion

from device.registry import get_device
from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.engine.emulated.digests import LAYER_BYTES
from epd_serve.errors import Conflict, InstanceLost, InvalidRequest, ServeError, StageTimeout, Unavailable
from epd_serve.instance import lifecycle as lifecycle_module
from epd_serve.instance.instance import Instance
from epd_serve.instance.lifecycle import SwitchState
from epd_serve.protocol import wire
from epd_serve.protocol.instance_state import LeaveOrder, RoleOrder
from epd_serve.rpc import items
from epd_serve.rpc.link import MAX_BODY_BYTES, Link, LinkCall
from epd_serve.types import Role

MAX_TOKENS = 200
ROLES = ("P", "D", "E", "PD", "E", "EPD", "D", "EP", "ED", "P")


def request(name: str, *, max_tokens: int = MAX_TOKENS, **more: Any) -> bytes:
    made = completion(name, "apple banana cherry " * 3, stream=True, max_tokens=max_tokens, **more)
    return wire.encode(made)


async def read(answer: LinkCall) -> list[tuple[int, list[int], bytes]]:
    """The frames until the end, or until the connection is cut."""
    body = b""
    try:
        async for chunk in answer.chunks():
            body += chunk
    except InstanceLost:
        pass
    return whole_items(body)


def tokens(answer: list[tuple[int, list[int], bytes]]) -> list[int]:
    return [token for _, ids, _ in answer for token in ids]


#: Bytes of a KV block of :func:`model`.
BLOCK = 40960


def role_settings(path: Path, **roles: Any) -> None:
    (path / "roles.json").write_text(json.dumps(roles))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")


# ---------------------------------------------------------------------- another role


@pytest.mark.parametrize(
    ("device", "roles"),
    [
        ("cpu", ROLES),
        pytest.param(CHIP, ROLES, id="chip", marks=pytest.mark.slow),
    ],
)
async def test_every_role_is_reached_from_every_other(device: str, roles: Sequence[str], model: Path) -> None:
    sizes = {"num_blocks": 512, "max_num_seqs": 4, "feature_cache_bytes": 1 << 20}
    # room for all stages of one role, with what a step of it needs, and not for those of two
    async with serving(model, "P", device=device, **sizes) as instance:
        with little_memory(device, 1.7):
            for epoch, role in enumerate(roles[1:], start=1):
                changed = await instance.lifecycle.switch(RoleOrder(role=role))
                assert (changed.old, changed.new) == (roles[epoch - 1], role)
                info = instance.info()
                assert (info.role, info.epoch, info.ready, info.state) == (role, epoch, True, "SERVING")
                assert (info.block_size > 0) == (role != "E")
                if set("PD") <= set(role):
                    async with answering(instance, request(f"r{epoch}", max_tokens=5)) as answer:
                        assert len(tokens(await read(answer))) == 5
                await Books({"i": instance.url}).check()
            with pytest.raises(InvalidRequest):
                await instance.lifecycle.switch(RoleOrder(role="X"))


@pytest.mark.parametrize("device", ["cpu", pytest.param(CHIP, marks=pytest.mark.slow)])
async def test_running_answers_go_on_elsewhere_token_by_token(device: str, tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with (
        serving(model, "PD", num_blocks=100, device=device) as leaving,
        serving(model, "EPD", num_blocks=100, device=device) as staying,
    ):
        async with answering(staying, request("whole")) as answer:
            whole = tokens(await read(answer))
        async with answering(leaving, request("first")) as answer:
            changed = await leaving.lifecycle.switch(RoleOrder(role="P", patience_s=0))
            first = await read(answer)
        assert changed.new == leaving.info().role == "P"
        assert 0 < len(tokens(first)) < MAX_TOKENS, "it was given up in its middle"
        label, _, event = first[-1]
        assert label == items.ERROR and json.loads(event[6:])["error"]["code"] == "draining"
        async with answering(staying, request("rest", generated=tokens(first))) as answer:
            assert tokens(first) + tokens(await read(answer)) == whole
        with pytest.raises(ServeError) as lacks:
            leaving.require_decoder()
        assert lacks.value.code == "draining", "others go elsewhere as well"
        await Books({"leaving": leaving.url, "staying": staying.url}).check()


async def test_an_order_is_called_back_cancelled_or_too_late(model: Path) -> None:
    async with serving(model, "PD", num_blocks=100) as instance, Link("i", instance.url) as link:
        switch = instance.lifecycle.switch
        async with held(instance):
            with pytest.raises(StageTimeout):
                await switch(RoleOrder(role="P", deadline_s=0.05))
            assert instance.info().ready and instance.info().epoch == 0
            ordered = asyncio.create_task(switch(RoleOrder(role="P")))
            await until(lambda: instance.lifecycle.state is SwitchState.DRAINING)
            assert not instance.info().ready
            with pytest.raises(Conflict):
                await switch(RoleOrder(role="D"))
            with pytest.raises(Conflict):
                await instance.lifecycle.leave(LeaveOrder())
            with pytest.raises(Unavailable) as refused:
                await link.ask("/stage/prefill", [request("x")])
            assert refused.value.code == "draining"
            back = await switch(RoleOrder(role="PD"))
            assert (back.old, back.new, instance.info().epoch) == ("PD", "PD", 0)
            with pytest.raises(Conflict):
                await ordered
            ordered = asyncio.create_task(switch(RoleOrder(role="P")))
            await until(lambda: instance.lifecycle.state is SwitchState.DRAINING)
            ordered.cancel()
            await asyncio.gather(ordered, return_exceptions=True)
            assert instance.info().ready, "whoever ordered it is gone"
        await Books({"i": instance.url}).check()


async def test_what_a_failed_rebuild_has_made_is_kept_or_given_back(model: Path, tmp_path: Path) -> None:
    role_settings(tmp_path, E={}, D={"kv_cache_bytes": BLOCK}, P={"kv_cache_bytes": BLOCK})
    async with serving(model, "E", switch_dir=tmp_path, resident="all", num_blocks=None) as instance:
        before, parts = num_slabs(instance), set[int]()
        for epoch, role in enumerate(("D", "P", "D"), start=1):  # too few blocks for a pool
            with pytest.raises(ServeError):
                await instance.lifecycle.switch(RoleOrder(role=role))
            info = instance.info()
            assert (info.role, info.epoch, info.ready) == ("E", epoch, True)
            assert (tmp_path / "e.role").read_text() == "E"
            parts.add(id(instance.weights))
            assert instance.weights is not None and num_slabs(instance) == before
        assert len(parts) == 1, "the weights are not loaded again"
        role_settings(tmp_path, D={"kv_cache_bytes": 20 * BLOCK})
        await instance.lifecycle.switch(RoleOrder(role="D"))
        assert num_slabs(instance) == before + 1
        await Books({"i": instance.url}).check()


def num_slabs(instance: Instance) -> int:
    return len(instance.transport._slabs)  # type: ignore[attr-defined]


async def test_weights_and_settings_are_those_of_the_role(model: Path, tmp_path: Path) -> None:
    role_settings(
        tmp_path,
        E={"feature_cache_bytes": 1 << 20, "image_budget_pixels": 1 << 16},
        P={"kv_cache_bytes": 64 * BLOCK},
    )
    for resident, stays in (("role", False), ("all", True)):
        async with serving(model, "P", num_blocks=64, resident=resident, switch_dir=tmp_path) as instance:
            assert bool(instance.info().parameters["tower"]) is stays
            await instance.lifecycle.switch(RoleOrder(role="E"))
            budgets = instance.info().budgets
            assert (budgets["feature_cache_bytes"], budgets["image_budget_pixels"]) == (1 << 20, 1 << 16)
            await instance.lifecycle.switch(RoleOrder(role="P"))
            assert instance.info().budgets["feature_cache_bytes"] != 1 << 20
            assert bool(instance.info().parameters["tower"]) is stays
            await Books({"i": instance.url}).check()


def test_the_role_outlives_the_process(tmp_path: Path) -> None:
    options = InstanceOptions(
        name="p0",
        role=Role.parse("P"),
        model=Path("m"),
        served_model_name="m",
        switch_dir=tmp_path,
        kv_cache_bytes=10,
    )
    assert options.in_remembered_role() == options
    role_settings(tmp_path, D={"kv_cache_bytes": 20}, P={"kv_cache_bytes": 10})
    options.in_role(Role.parse("D")).remember_role()
    again = options.in_remembered_role()
    assert (str(again.role), again.kv_cache_bytes) == ("D", 20)
    again.in_role(Role.parse("P")).remember_role()
    assert options.in_remembered_role() == options


# ---------------------------------------------------------------------- leaving


async def test_one_that_leaves_sends_its_work_away_or_keeps_it(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    async with serving(model, "PD", num_blocks=100) as instance:
        lifecycle = instance.lifecycle
        # of two choices each can only end where it is
        async with answering(instance, request("two", n=2)) as answer, held(instance):
            with pytest.raises(StageTimeout):
                await lifecycle.leave(LeaveOrder(deadline_s=0.05))
            assert instance.info().ready, "it serves on"
            cancelled = asyncio.create_task(lifecycle.leave(LeaveOrder()))
            await until(lambda: lifecycle.is_leaving)
            with pytest.raises(Conflict):
                await lifecycle.leave(LeaveOrder())
            with pytest.raises(Conflict):
                await lifecycle.switch(RoleOrder(role="P"))
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert instance.info().ready, "whoever ordered it is gone"
            assert len(tokens(await read(answer))) == 2 * MAX_TOKENS
        async with answering(instance, request("one")) as answer:
            await lifecycle.leave(LeaveOrder(patience_s=0))
            assert 0 < len(tokens(await read(answer))) < MAX_TOKENS
        assert not instance.info().ready
        with pytest.raises(Unavailable) as refused:
            instance.check_accepting()
        assert refused.value.code == "draining"
        await lifecycle.leave(LeaveOrder())  # it is empty already
        await Books({"i": instance.url}).check()


async def test_one_that_nobody_ends_serves_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_module, "_EMPTY_S", 0.05)
    async with serving(model, "PD", num_blocks=100) as instance:
        await instance.lifecycle.leave(LeaveOrder())
        assert not instance.info().ready
        await until(lambda: instance.info().ready)
        instance.check_accepting()


async def test_a_process_that_ends_refuses_new_requests_and_answers_the_others(model: Path) -> None:
    async with serving(model, "EPD") as instance, Link("epd", instance.url) as link:
        running = asyncio.create_task(link.ask("/stage/prefill", [request("r")], MAX_BODY_BYTES))
        await asyncio.to_thread(wait_until, lambda: instance.in_use()["sequences"] > 0, "it runs")
        ended = asyncio.create_task(instance.lifecycle.end())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable) as refused:
            await link.ask("/stage/prefill", [request("s")])
        assert refused.value.code == "draining"
        assert not instance.info().ready
        await ended
        assert (await running).endswith(items.pack(items.END, [], b"data: [DONE]\n\n"))


async def test_a_process_that_ends_builds_no_other_role(model: Path) -> None:
    async with serving(model, "PD", num_blocks=100) as instance:
        async with held(instance):
            ordered = asyncio.create_task(instance.lifecycle.switch(RoleOrder(role="P")))
            await until(lambda: instance.lifecycle.state is SwitchState.DRAINING)
            ended = asyncio.create_task(instance.lifecycle.end())
            with pytest.raises(Conflict):
                await ordered
        await ended
        assert (instance.lifecycle.epoch, str(instance.lifecycle.role)) == (0, "PD")


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("role", ["P", "D"])
async def test_the_host_s_side_of_the_kv_is_bounded(role: str) -> None:
    """However much KV the device has; a cell stands for K and V of a block in a layer of the model."""
    shape: Any = ShapeConfig(shape_of="qwen2.5-vl-7b")
    async with serving(shape, role, device="emulated:h200:0") as instance:
        assert instance.weights is not None
        memory: Any = instance.weights.memory
        num_cells = memory.region.nbytes // LAYER_BYTES
        assert memory.nbytes(num_cells, 1) <= 256 * 2**20
        assert memory.nbytes(memory.layout.num_layers, memory.num_blocks) > 64 * 2**30
        budgets = instance.info().budgets
        assert (budgets["max_num_seqs"], budgets["max_num_batched_tokens"]) == (256, 2048), "by the H200's memory"
        assert budgets["feature_cache_bytes"] == 2 << 30


async def test_the_kv_leaves_the_memory_of_the_largest_encode(tmp_path: Path) -> None:
    model, budget = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model"), 1 << 20
    sizes: dict[str, Any] = {"max_model_len": 512, "threads": 1, "feature_cache_bytes": 1 << 16}
    sizes |= {"max_num_seqs": 4, "max_num_batched_tokens": 256}
    device = get_device("chip:9")
    device.set_memory_fraction((768 << 20) / device.memory()[0])
    try:
        async with serving(model, "EPD", device="chip:9", image_budget_pixels=budget, **sizes) as instance:
            batch = instance.streams.tower.batch_bytes(budget)
            assert 1 << 20 < 0.9 * batch <= device.headroom()
    finally:
        device.set_memory_fraction(1.0)


class Lingering(ThreadPoolExecutor):
    """Its threads refer to what they have called a little longer than until its end, as any thread may."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: deque[Any] = deque(maxlen=2)

    def submit(self, call: Any, /, *args: Any, **named: Any) -> Any:
        self.latest.append((call, args, named))
        return super().submit(call, *args, **named)


@pytest.mark.parametrize(
    ("kind", "role"),
    [("qwen2_5_vl", "P"), ("gemma3", "P"), pytest.param("qwen2_5_vl", "PD", marks=pytest.mark.slow)],
)
async def test_a_role_leaves_nothing_on_the_device(kind: str, role: str, tmp_path: Path) -> None:
    """Memory comes back when nobody needs it, not when the collector of cycles runs by chance."""
    name = "chip:9"  # other tests of this process have other kinds at lower ones
    device, model = get_device(name), tiny_models.make_tiny_model(kind, tmp_path / "model")

    def used() -> int:
        total, free = device.memory()
        return total - free

    asyncio.get_running_loop().set_default_executor(Lingering())
    sizes = {"num_blocks": 512, "feature_cache_bytes": 1 << 16, "max_model_len": 512, "threads": 1}
    async with serving(model, role, device=name, switch_dir=tmp_path, **sizes) as instance:
        gc.collect()
        gc.disable()
        try:
            first = used()
            device.reset_peak_memory()
            for _ in range(2):
                await instance.rebuild(Role.parse("E"))
                between = used()
                await instance.rebuild(Role.parse(role))
            assert used() <= first + 65536 and between < first
            assert device.peak_memory() < 1.5 * first, "both at once"
        finally:
            gc.enable()
