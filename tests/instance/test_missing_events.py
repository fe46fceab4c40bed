"""A chip leaves no numbers where an event is not waited for: an error says so, no answer comes."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from chat import chat
from chip.accelerator import ChipDevice
from in_process import deployment, language_of

from device.copies import Readback, to_device
from device.cpu import CpuEvent
from device.registry import get_device
from epd_serve.engine.step import StepExecutor
from epd_serve.engine.step_inputs import StepInputs

DEVICE = "chip:15"
LAUNCH_S = 4e-4  # nothing is ready by chance


def compute_over_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the KV that a step writes be no number until it has."""
    compute = StepExecutor.compute

    def marked(executor: Any, inputs: StepInputs, *arguments: Any) -> Any:
        slots = to_device(torch.tensor(inputs.slots, dtype=torch.int64), executor.device)
        executor._kv.flatten(2, 3).index_fill_(2, slots, math.nan)
        return compute(executor, inputs, *arguments)

    monkeypatch.setattr(StepExecutor, "compute", marked)


class Careless:
    """A device whose events wait for nothing."""

    record_event = CpuEvent


@pytest.mark.parametrize("transport", ["auto", pytest.param("shm", marks=pytest.mark.slow)])
async def test_no_answer_comes_of_what_was_read_early(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    compute_over_unknown(monkeypatch)
    device = get_device(DEVICE)
    assert isinstance(device, ChipDevice)
    transfer = {"group_layers": 1, "transport": transport}
    options: dict[str, Any] = {"device": DEVICE, "max_num_seqs": 2, "kv_transfer": transfer}
    async with deployment(model, "P", "D", options=options, probe_timeout_s=300, restart="never") as here:
        body = chat("What is this?", model="demo", max_tokens=4, temperature=0, ignore_eos=True)

        async def refusal() -> str:
            status, answer = await here.post("/v1/chat/completions", body)
            assert status == 500, answer
            message: str = answer["error"]["message"]
            return message

        _, right = await here.post("/v1/chat/completions", body)
        monkeypatch.setattr(device.chip, "launch_s", LAUNCH_S)
        loop = language_of(here.instances["p0"])._loop
        assert loop._push is not None
        with monkeypatch.context() as patch:  # groups of layers go out while they are computed
            patch.setattr(loop, "_push", replace(loop._push, record_event=CpuEvent))
            assert "the logits of this request are no numbers" in await refusal()
        with monkeypatch.context() as patch:  # tokens are taken while the step after theirs is launched
            patch.setattr(Readback, "wait", lambda readback: readback._copy)
            assert "tokens were read before the device had chosen them" in await refusal()
        gate = threading.Event()
        cache = language_of(here.instances["d1"]).memory  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:  # D decodes while its copies from P's device are still to be made
            cache._copies.launch(gate.wait)
            patch.setattr(cache, "_device", Careless())
            status, early = await here.post("/v1/chat/completions", body)
            assert status == 500 or early["choices"] != right["choices"]
        gate.set()
        device.synchronize()
        _, again = await here.post("/v1/chat/completions", body)
        assert again["choices"] == right["choices"]
        await here.settle()
