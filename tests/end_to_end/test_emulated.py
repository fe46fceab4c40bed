"""Deployments on emulated accelerators: what is read too early is no number, and tokens are those of generate."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from chat import chat
from fleet import figures
from identity import MAX_TOKENS, start_fleet
from in_process import deployment
from pictures import noise
from reference import Reference

from epd_serve.cost.device_time import DeviceTime

TOPOLOGIES = {"EPD": ("epd0",), "E-P-D": ("e0", "p0", "d0"), "ED-P": ("ed0", "p0")}
CASES: dict[str, dict[str, Any]] = {
    "pushed KV, steps launched ahead": {"async_scheduling": "on"},
    "through host memory": {"kv_transfer": {"transport": "shm"}},
    "pulled KV, small pool": {"kv_transfer": {"mode": "pull", "staging_bytes": "64KiB"}, "num_blocks": 20},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
async def test_tokens_equal_generate(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path / "cache"))
    model = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    settings = {"devices": ["emulated:h200 x 5"], "instances": CASES[case]}
    async with start_fleet(model, "E-P-ED-EPD-D", **settings) as fleet:
        for _ in range(3):  # whether sequences meet in the small pool is a matter of timing
            for names in TOPOLOGIES.values():
                await fleet.check_tokens(names)
            preempted = [(await figures(url))["preemptions_total"] for url in fleet.urls.values()]
            if "num_blocks" not in CASES[case] or sum(preempted):
                return
    raise AssertionError("the pool was large enough for all")


@pytest.mark.parametrize("mode", ["grouped", "pull"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
async def test_kv_goes_through_host_memory_that_is_far_smaller(kind: str, mode: str, tmp_path: Path) -> None:
    """All answers at once, each through the same few cells many times; a recurrent state as well."""
    model = tiny_models.make_tiny_model(kind, tmp_path / "model")
    reference = Reference(model)
    asked = [("What is this?", [noise(1)]), ("Repeat: " + "apple banana " * 20, []), ("Say apple", [])]
    fields = {"max_tokens": 6, "ignore_eos": True, "skip_special_tokens": False, "logprobs": True}
    transfer = {"mode": mode, "transport": "shm", "staging_bytes": "32KiB"}
    options = {"device": "emulated:h200:2", "block_size": 8, "max_num_batched_tokens": 40, "kv_transfer": transfer}
    async with deployment(model, "EP", "D", options=options) as one:
        answers = await asyncio.gather(
            *(one.post("/v1/chat/completions", chat(text, *images, **fields)) for text, images in asked)
        )
        for (status, answer), (text, images) in zip(answers, asked, strict=True):
            assert status == 200, answer
            chosen = answer["choices"][0]["logprobs"]["content"]
            found = [bytes(token["bytes"]).decode(errors="replace") for token in chosen]
            tokens = reference.generate(text, images, max_tokens=6)
            assert found == [reference.tokenizer.decode([token]) for token in tokens], text
        await one.settle()
        for instance in one.instances.values():
            assert instance.language is not None
            memory: Any = instance.language.weights.memory
            assert memory.region.nbytes <= 1 << 15
            moved = await figures(instance.url)
            if instance.options.role.decodes:
                assert moved["kv_bytes_total"] > 3 * memory.region.nbytes


@pytest.mark.parametrize("mode", ["grouped", "pull"])
async def test_kv_goes_from_device_to_device(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of it through the host; also once the decode instance has had another role and other memory."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(model)
    asked = [("What is this?", [noise(1)]), ("Repeat: " + "apple banana " * 20, []), ("Say apple", [])]
    fields = {"max_tokens": 6, "ignore_eos": True, "skip_special_tokens": False, "logprobs": True}
    tokens = {text: reference.generate(text, images, max_tokens=6) for text, images in asked}
    options = {
        "device": "emulated:h200:2",
        "block_size": 8,
        "max_num_batched_tokens": 40,
        "kv_transfer": {"mode": mode},
    }
    monkeypatch.setattr(KVCache, "copy", None)  # between the device and the host's cells
    async with deployment(model, "EP", "D", options=options) as one:
        decode = one.instances["d1"]

        async def ask() -> None:
            answers = await asyncio.gather(
                *(one.post("/v1/chat/completions", chat(text, *images, **fields)) for text, images in asked)
            )
            for (status, answer), (text, _) in zip(answers, asked, strict=True):
                assert status == 200, answer
                chosen = answer["choices"][0]["logprobs"]["content"]
                found = [bytes(token["bytes"]).decode(errors="replace") for token in chosen]
                assert found == [reference.tokenizer.decode([token]) for token in tokens[text]], text
            await one.settle()

        await ask()
        [mapped] = mappings(decode)
        used = decode.device.memory()
        await decode.rebuild(Role.parse("E"))
        assert not mappings(decode), "P maps memory that is no longer D's"
        await decode.rebuild(Role.parse("D"))
        assert decode.device.memory()[1] >= used[1]
        await ask()
        [again] = mappings(decode)
        assert again != mapped
        moved = [await figures(instance.url) for instance in one.instances.values()]
        assert [figure["kv_bytes_total"] > 0 for figure in moved] == [True, False], "P writes, D reads nothing"


def mappings(decode: Instance) -> set[str]:
    """The memory of the language model of an instance that others in this process map."""
    weights = decode.language.weights if decode.language else None
    if weights is None:
        names = set(re.findall(r"memfd:(emulated-\w+)", Path("/proc/self/maps").read_text()))
        return names - {json.loads(...)[2]}
    return set()


@pytest.mark.slow
async def test_instances_on_one_device_share_its_memory(tmp_path: Path) -> None:
    """And they take the time that a larger model would."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    settings = {"devices": ["emulated:a100:0"], "shape_of": "llava-1.6-34b"}
    async with start_fleet(model, "(E-PD)", **settings) as fleet:
        began_s = time.perf_counter()
        await fleet.check_tokens(("e0", "pd0"))
        step_s, _ = DeviceTime.of("llava-1.6-34b", "a100").step(1, 1, 1, 0)
        assert time.perf_counter() - began_s > 2 * MAX_TOKENS * step_s, "answers, whole and then streamed"
