"""A running instance comes to another role: what it has goes on elsewhere, and whatever fails, it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from chips import CHIP, little_memory
from fleet import Books
from in_process import answering, held, serving
from item_bodies import whole_items
from pictures import png
from PIL import Image

from device.registry import get_device
from epd_serve.config import InstanceOptions
from epd_serve.config.role_files import in_role, remember, remembered
from epd_serve.engine.device_features import DeviceFeatureStore
from epd_serve.errors import Conflict, InstanceLost, InvalidRequest, ServeError, StageTimeout
from epd_serve.instance.http import Peers
from epd_serve.instance.instance import Instance
from epd_serve.instance.lifecycle import SwitchState
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc import items
from epd_serve.rpc.link import LinkCall
from epd_serve.types import Role, SamplingParams, Stage

MAX_TOKENS = 200


def request(
    name: str,
    *,
    n: int = 1,
    generated: list[int] | None = None,
    max_tokens: int = MAX_TOKENS,
    continuous_usage: bool = False,
) -> bytes:
    return wire.encode(
        wire.PrefillRequest(
            request_id=name,
            output=wire.OutputOptions(
                "completion", "r", 0, "tiny", stream=True, continuous_usage=continuous_usage
            ),
            sampling=SamplingParams(seed=7, max_tokens=max_tokens, ignore_eos=True, temperature=0.0, n=n),
            items=[],
            prompt="apple banana cherry " * 3,
            generated=generated or [],
        )
    )


def order(role: str, **limits: Any) -> instance_state.RoleOrder:
    return instance_state.RoleOrder(role=role, **limits)


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


async def draining(instance: Instance) -> None:
    while instance.lifecycle.state is not SwitchState.DRAINING:  # noqa: ASYNC110
        await asyncio.sleep(0)


ROLES = ("P", "D", "E", "PD", "E", "EPD", "D", "EP", "ED", "P")


@pytest.mark.parametrize(
    ("device", "roles"),
    [
        ("cpu", ROLES),
        pytest.param(CHIP, ROLES, id="chip", marks=pytest.mark.slow),
    ],
)
async def test_every_role_is_reached_from_every_other(device: str, roles: Sequence[str], tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    sizes = {"num_blocks": 512, "max_num_seqs": 4, "feature_cache_bytes": 1 << 20}
    async with serving(model, "P", device=device, **sizes) as instance:
        # room for all stages of one role, with what a step of it needs, and not for those of two
        with little_memory(device, 1.7):
            await switched(instance, roles)


async def switched(instance: Instance, roles: Sequence[str]) -> None:
    for epoch, role in enumerate(roles[1:], start=1):
        changed = await instance.lifecycle.switch(order(role))
        assert (changed.old, changed.new, changed.epoch) == (roles[epoch - 1], role, epoch)
        info = instance.info()
        assert (info.role, info.epoch, info.ready, info.state) == (role, epoch, True, "SERVING")
        assert (info.block_size > 0) == (role != "E")
        if set("PD") <= set(role):
            async with answering(instance, request(f"r{epoch}", max_tokens=5)) as answer:
                assert len(tokens(await read(answer))) == 5
        await Books({"i": instance.url}).check()
    with pytest.raises(InvalidRequest, match="no stage"):
        await instance.lifecycle.switch(order("X"))


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
            changed = await leaving.lifecycle.switch(order("P", patience_s=0))
            first = await read(answer)
        assert changed.new == "P" and leaving.info().role == "P"
        assert 0 < len(tokens(first)) < MAX_TOKENS, "it was given up in its middle"
        label, _, event = first[-1]
        assert label == items.ERROR and json.loads(event[6:])["error"]["code"] == "draining"
        async with answering(staying, request("rest", generated=tokens(first))) as answer:
            assert tokens(first) + tokens(await read(answer)) == whole
        with pytest.raises(ServeError, match="does not decode") as lacks:
            leaving.serving(Stage.DECODE)
        assert lacks.value.code == "draining", "others go elsewhere as well"
        await Books({"leaving": leaving.url, "staying": staying.url}).check()


async def test_choices_that_tell_the_usage_of_all_in_each_event_end_where_they_are(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("llava", tmp_path / "model")
    async with serving(model, "PD", num_blocks=100) as instance:
        async with answering(instance, request("two", n=2, continuous_usage=True)) as answer:
            changed = await instance.lifecycle.switch(order("P", deadline_s=100, patience_s=0))
            assert len(tokens(await read(answer))) == 2 * MAX_TOKENS
        assert changed.new == "P"
        await Books({"i": instance.url}).check()


async def test_an_order_is_called_back_cancelled_or_too_late(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("llava", tmp_path / "model")
    peers = Peers()
    async with serving(model, "PD", num_blocks=100) as instance:
        async with held(instance):
            with pytest.raises(StageTimeout, match="role PD is served on"):
                await instance.lifecycle.switch(order("P", deadline_s=0.05))
            assert instance.info().ready and instance.info().epoch == 0
            ordered = asyncio.create_task(instance.lifecycle.switch(order("P")))
            await draining(instance)
            assert not instance.info().ready
            with pytest.raises(Conflict, match="on its way from PD to P"):
                await instance.lifecycle.switch(order("D"))
            with pytest.raises(ServeError) as refused:
                body = await peers.call(
                    instance.url, "/stage/prefill", wire.decode(request("x"), wire.PrefillRequest)
                )
                raise AssertionError(body)
            assert refused.value.code == "draining"
            back = await instance.lifecycle.switch(order("PD"))
            assert (back.old, back.new, back.epoch) == ("PD", "PD", 0)
            with pytest.raises(Conflict, match="called back"):
                await ordered
            ordered = asyncio.create_task(instance.lifecycle.switch(order("P")))
            await draining(instance)
            ordered.cancel()
            await asyncio.gather(ordered, return_exceptions=True)
            assert instance.info().ready, "whoever ordered it is gone"
        await Books({"i": instance.url}).check()
    await peers.close()


async def test_a_role_that_cannot_be_built_leaves_the_old_one(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    (tmp_path / "roles.json").write_text(json.dumps({"P": {"num_blocks": 50}, "D": {"num_blocks": 1}}))
    async with serving(model, "P", num_blocks=50, switch_dir=tmp_path) as instance:
        with pytest.raises(ServeError, match="role P is served on"):
            await instance.lifecycle.switch(order("D"))
        info = instance.info()
        assert (info.role, info.epoch, info.ready) == ("P", 1, True)
        assert (tmp_path / "p.role").read_text() == "P"
        await Books({"i": instance.url}).check()


async def test_what_a_failed_rebuild_has_made_is_kept_or_given_back(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    (tmp_path / "roles.json").write_text(json.dumps({"E": {}, "D": {"num_blocks": 1}, "P": {"num_blocks": 1}}))
    async with serving(model, "E", switch_dir=tmp_path, resident="all") as instance:
        before, parts = num_slabs(instance), set[int]()
        for role in ("D", "P", "D"):  # too few blocks for a pool
            with pytest.raises(ServeError, match="role E is served on"):
                await instance.lifecycle.switch(order(role))
            parts.add(id(instance._weights))
            assert instance._weights is not None and num_slabs(instance) == before
        assert len(parts) == 1, "the weights are not loaded again"
        (tmp_path / "roles.json").write_text(json.dumps({"D": {"num_blocks": 20}}))
        await instance.lifecycle.switch(order("D"))
        assert num_slabs(instance) == before + 1
        await Books({"i": instance.url}).check()


def num_slabs(instance: Instance) -> int:
    return len(instance.transport._slabs)  # type: ignore[attr-defined]


async def test_an_encoder_has_the_settings_of_its_new_role(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    encoder = {"feature_cache_bytes": 1 << 20, "image_budget_pixels": 1 << 16}
    (tmp_path / "roles.json").write_text(json.dumps({"E": encoder, "P": {"feature_cache_bytes": 1 << 16}}))
    peers, picture = Peers(), png(Image.new("RGB", (56, 56), "red"))

    def encode(owner: str, consumer: Instance) -> asyncio.Task[bytes]:
        ref = wire.MediaRef(mm_hash=owner, width=56, height=56)
        message = wire.EncodeRequest(request_id=owner, ref=ref, media=picture, announce_to=consumer.url)
        return asyncio.create_task(peers.call(instance.url, "/stage/encode", message))

    async with (
        serving(model, "P", num_blocks=20, switch_dir=tmp_path, feature_cache_bytes=1 << 16) as instance,
        serving(model, "P", name="other", num_blocks=20) as other,
    ):
        await encode("0" * 64, other)
        await instance.lifecycle.switch(order("E"))
        await encode("1" * 64, other)
        assert capacity(instance) == 1 << 20
        assert instance.info().budgets["image_budget_pixels"] == instance.encoder._budget == 1 << 16
        await instance.lifecycle.switch(order("P"))
        await encode("3" * 64, other)
        assert capacity(instance) == 1 << 16
        assert other.language is not None
        for number in "013":  # requests that never come
            other.language.receiver.release(number * 64)
        await Books({"i": instance.url, "other": other.url}).check()
    await peers.close()


def capacity(instance: Instance) -> int:
    return instance.store._allocator.capacity  # type: ignore[attr-defined]


def test_the_role_outlives_the_process(tmp_path: Path) -> None:
    options = InstanceOptions(
        name="p0", role=Role.parse("P"), model=Path("m"), served_model_name="m", switch_dir=tmp_path, num_blocks=10
    )
    assert remembered(options) == options
    (tmp_path / "roles.json").write_text(json.dumps({"D": {"num_blocks": 20}, "P": {"num_blocks": 10}}))
    remember(in_role(options, Role.parse("D")))
    again = remembered(options)
    assert (str(again.role), again.num_blocks) == ("D", 20)
    remember(in_role(again, Role.parse("P")))
    assert remembered(options) == options


async def test_weights_of_other_roles_stay_or_go(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    for resident, stays in (("role", False), ("all", True)):
        async with serving(model, "P", num_blocks=64, resident=resident) as instance:
            assert bool(instance.info().parameters["tower"]) is stays
            await instance.lifecycle.switch(order("E"))
            await instance.lifecycle.switch(order("P"))
            assert bool(instance.info().parameters["tower"]) is stays
            await Books({"i": instance.url}).check()


async def test_a_store_takes_a_part_of_what_others_leave_of_its_device(tmp_path: Path) -> None:
    model, device = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model"), get_device(CHIP)
    device.set_memory_fraction((1 << 30) / device.memory()[0])  # its graphs take a part
    try:
        async with serving(model, "E", device=CHIP) as instance:
            assert isinstance(instance.store, DeviceFeatureStore) and instance.store._area is not None
            assert 1 << 20 < instance.store._area.nbytes <= 256 << 20
    finally:
        device.set_memory_fraction(1.0)
