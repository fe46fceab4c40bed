"""A step's decodes have the inputs of their sequences, whoever came, went, rested or moved before it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device.base import Device
from device.registry import get_device
from epd_serve.engine.step_inputs import DecodeTables, DeviceTables

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
