"""Deployments on chips of tests: what is read too early is no number, and tokens are those of generate."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from chat import chat
from fleet import figures
from in_process import Deployment, deployment
from pictures import noise
from reference import Reference

from epd_serve.engine.device_features import Copies
from epd_serve.engine.kv_memory import KVMemory
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.types import Role

FIELDS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "skip_special_tokens": False, "logprobs": True}
OPTIONS = {"device": "chip:2", "block_size": 8, "max_num_batched_tokens": 40}
#: All instances are in the test's process, which a busy machine keeps from answering for a while.
UNWATCHED_S = 300


ASKED: list[tuple[str, list[Any]]] = [
    ("What is this?", [noise(1)]),
    ("Repeat: " + "apple banana " * 20, []),
    ("Say apple", []),
]


async def check_answers(one: Deployment, reference: Reference, *asked: tuple[str, list[Any]]) -> None:
    """Ask all texts with their pictures at once: the tokens are those of ``generate``, nothing is held."""
    asked = asked or tuple(ASKED)
    answers = await asyncio.gather(
        *(one.post("/v1/chat/completions", chat(text, *images, **FIELDS)) for text, images in asked)
    )
    for (status, answer), (text, images) in zip(answers, asked, strict=True):
        assert status == 200, answer
        chosen = answer["choices"][0]["logprobs"]["content"]
        found = [bytes(token["bytes"]).decode(errors="replace") for token in chosen]
        tokens = reference.generate(text, images, max_tokens=FIELDS["max_tokens"])
        assert found == [reference.tokenizer.decode([token]) for token in tokens], text
    await one.settle()


HOST_COPIES: tuple[tuple[type, str], ...] = ((KVMemory, "copy"), (Copies, "to_host"), (Copies, "to_device"))


def host_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for part, name in HOST_COPIES:
        monkeypatch.setattr(part, name, None)


def copying_threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """The threads on which KV and features will have been copied, by the name of the function that does it."""
    threads: dict[str, set[int]] = {}

    def watch(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return inner(*arguments, **keywords)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in (*HOST_COPIES, (EmbeddedTransport, "read")):
        watch(owner, name)
    return threads


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
async def test_kv_goes_through_host_memory_that_is_far_smaller(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers at once, each through the same few cells many times; a recurrent state as well.

    No copy of KV or a feature runs on the event loop.
    """
    model = tiny_models.make_tiny_model(kind, tmp_path / "model")
    reference = Reference(model)
    options = OPTIONS | {"kv_transfer": {"transport": "tcp"}, "staging_bytes": 32 << 10}
    threads = copying_threads(monkeypatch)
    async with deployment(model, "E", "P", "D", options=options, probe_timeout_s=UNWATCHED_S) as one:
        await check_answers(one, reference)
        for instance in one.instances.values():
            if instance.weights is None:
                continue
            memory: Any = instance.weights.memory
            assert memory.region.nbytes <= 1 << 15
            moved = await figures(instance.url)
            if instance.options.role.decodes:
                assert moved["kv_bytes_total"] > 3 * memory.region.nbytes
    assert threads.keys() == {"copy", "to_host", "to_device", "read"}
    assert threading.get_ident() not in set().union(*threads.values())


@pytest.mark.slow
@pytest.mark.parametrize("roles", [("EP", "D"), ("E", "P", "D")])
async def test_features_and_kv_go_from_device_to_device(
    roles: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it through the host; also once the decode instance has had another role and other memory."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(model)
    host_copies_nothing(monkeypatch)
    async with deployment(model, *roles, options=OPTIONS, probe_timeout_s=UNWATCHED_S) as one:
        decode = list(one.instances.values())[-1]
        await check_answers(one, reference)
        before = mapped()
        assert len(before) == len(roles) - 1, "P's KV, and E's features where E is apart"
        used = decode.device.memory()
        await decode.rebuild(Role.parse("E"))
        assert len(mapped()) == len(roles) - 2, "an encode instance maps the KV of P"
        await decode.rebuild(Role.parse("D"))
        assert decode.device.memory()[1] >= used[1]
        await check_answers(one, reference)
        assert mapped() == before
        assert (await figures(decode.url))["kv_bytes_total"] > 0, "D reads"


@pytest.mark.parametrize(
    "consumer",
    [{"device": "cpu"}, pytest.param({"kv_transfer": {"transport": "shm"}}, marks=pytest.mark.slow)],
    ids=["on the cpu", "through host memory"],
)
async def test_features_go_by_the_host_where_the_device_is_not_reached(
    consumer: dict[str, Any], tmp_path: Path
) -> None:
    """The consumer does not map the encoder's device, or nobody may map it."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    reference = Reference(model)
    encoder = {**consumer, "device": "chip:2"}
    of = {"e0": encoder, "pd1": {"device": "chip:2", **consumer}}
    async with deployment(model, "E", "PD", of=of, probe_timeout_s=UNWATCHED_S) as one:
        for _ in range(2):
            await check_answers(one, reference, ASKED[0])
        encoded = await figures(one.instances["e0"].url)
        assert encoded["encodes_total"] and not mapped()
        assert (await figures(one.instances["pd1"].url)).get("encodes_total", 0) == 0, "P encodes nothing itself"


def mapped() -> set[str]:
    """The memory of devices that is mapped by more instances than its owner, all in this process."""
    counts = Counter(re.findall(r"/memfd:(chip-\w+)", Path("/proc/self/maps").read_text()))
    return {name for name, count in counts.items() if count > 1}
