"""A step's decodes have the inputs of their sequences, whoever came, went, rested or moved before it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from chip import tensors
from engine_bench import EngineBench
from hypothesis import given, settings
from hypothesis import strategies as st

from device.base import Device
from device.registry import get_device
from epd_serve.engine.step_inputs import DecodeTables, DeviceTables
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.sequence import Sequence

SIZE, SEATS, MAX_BLOCKS = 4, 5, 40
EVENTS = ["come", "go", "move", "rest", "back", "same", "same", "same"]


class Decode:
    def __init__(self, first: int, length: int) -> None:
        self.blocks = list(range(first, first + 2))
        self.length, self.delta = length, first % 7 - 3
        self.rests = False


@cache
def device(name: str) -> Device:
    return get_device(name)


@pytest.mark.parametrize("name", ["cpu", "chip:0"])
@settings(max_examples=40)
@given(events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9)), max_size=40))
def test_inputs_are_those_of_the_sequences(name: str, events: list[tuple[str, int]]) -> None:
    host = DecodeTables(SIZE, SEATS)
    of_device = DeviceTables(device(name).torch_device, num_seats=SEATS, max_blocks=MAX_BLOCKS, block_size=SIZE)
    decodes: list[Decode] = []
    batch: list[Decode] = []
    for number, (event, which) in enumerate(events):
        first, before = 1 + 10 * number, batch
        if event == "come" and len(decodes) < SEATS:
            decodes.append(Decode(first, 1 + which % 8))
        elif event == "go" and decodes:
            del decodes[which % len(decodes)]
        elif decodes:
            one = decodes[which % len(decodes)]
            if event == "move":  # it was preempted, and its blocks are others
                one.blocks = list(range(first, first + len(one.blocks)))
            one.rests = event == "rest" or (one.rests and event != "back")
        batch = [one for one in decodes if not one.rests]
        for one in batch:
            one.length += 1
            if one.length > SIZE * len(one.blocks):
                one.blocks += [first]
        lens = [one.length for one in batch]
        change = host.change([one.blocks for one in batch], lens, [one.delta for one in batch])
        if batch == before and event == "same":
            assert change.seats is None, "nothing is said of sequences that go on"
            assert all(len(blocks) == 1 for _, _, blocks in change.writes), "but for blocks that are new"
        of_device.update(change, lens)
        if not batch:
            continue
        expected = [SIZE * one.blocks[(one.length - 1) // SIZE] + (one.length - 1) % SIZE for one in batch]
        size = SEATS if which % 2 else len(batch)  # with rows of padding, and without
        slots, positions, table, contexts = of_device.advance(size, MAX_BLOCKS)
        spare = [row % SIZE for row in range(len(batch), size)]
        assert slots.tolist() == expected + spare
        assert contexts.tolist() == lens + [1] * (size - len(batch))
        assert table.dtype == torch.int32
        for row, one in zip(table.tolist(), batch, strict=False):
            used = -(-one.length // SIZE)
            assert row[:used] == one.blocks[:used]
        assert not table[len(batch) :].cpu().any()
        assert positions.tolist()[: len(batch)] == [one.length - 1 + one.delta for one in batch]


class UploadBench(EngineBench):
    """Counts the bytes that go to the device between the ends of two steps; begins when all is submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_bytes, self.steps = 0, list[tuple[list[Sequence], int]]()
        self.submitted = threading.Event()
        super().__init__(*args, **kwargs)

    def turn(self) -> AbstractContextManager[None]:
        self.submitted.wait()
        return nullcontext()

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        self.steps.append((output.sequences, self.num_bytes))
        self.num_bytes = 0
        super().stepped(output, seconds)


def test_an_ordinary_step_uploads_new_blocks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    budget = Budget(max_num_tokens=512, max_num_seqs=4)
    bench = UploadBench(model, budget, device=device("chip:0"), runs_ahead=True)
    pinned = tensors.pinned

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        bench.num_bytes += tensor.nbytes
        return pinned(tensor)

    monkeypatch.setattr(tensors, "pinned", counted)
    try:
        for number in range(4):
            bench.engine.submit(bench.sequence(str(number), "hello " * 30, [], max_tokens=30))
        bench.submitted.set()
        bench.collect(4)
    finally:
        bench.close()
    batches = [sequences for sequences, _ in bench.steps]
    ordinary = [
        num_bytes
        for place, (_, num_bytes) in enumerate(bench.steps)
        # the steps around it, as the next one is launched before this one ends
        if len(batches[place]) == 4 and batches[place - 2 : place + 2] == [batches[place]] * 4
    ]
    # A place and a block for each sequence that begins a block, and nothing for the others.
    assert len(ordinary) > 20 and ordinary.count(0) > len(ordinary) / 2
    assert sum(ordinary) > 0 and set(ordinary) <= {2 * 8 * count for count in range(5)}


def test_an_ordinary_step_names_new_blocks_alone() -> None:
    """A step of 256 sequences takes a block for one in sixteen of them; nothing grows with contexts."""
    host = DecodeTables(16, 256)
    lens = [8000 + row for row in range(256)]
    tables = [list(range(600)) for _ in lens]
    sizes = []
    for _ in range(20):
        change = host.change(tables, lens, [0] * 256)
        sizes.append(sum(len(blocks) for _, _, blocks in change.writes))
        lens = [length + 1 for length in lens]
    assert change.seats is None and sizes[0] > 500 * 256
    assert sizes[1:] == [16] * 19
