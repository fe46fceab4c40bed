"""Each block of a prompt goes out, in every layer, however the prompt is cut and the KV is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ablations.kv_push import LAYER_GROUPS
from device.base import Event
from device.registry import get_device
from epd_serve.engine.step_loop import KVPush, LayerGroups
from epd_serve.protocol import wire
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence as Prompt
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import OutgoingTransfer, Part
from epd_serve.types import SamplingParams

BLOCK_SIZE = 4


class Sender:
    """Notes what would be written: (layers, parts)."""

    def __init__(self, num_layers: int, group: int) -> None:
        self.sizer = GroupSizer(num_layers=num_layers, fixed=group)
        self.pushes: list[tuple[range, list[Part]]] = []

    def push(self, layers: range, parts: Sequence[Part], computed: Event | None = None) -> None:
        self.pushes.append((layers, list(parts)))


def prompt(name: str, num_tokens: int, first_block: int, state_blocks: int = 0) -> Prompt:
    blocks = list(range(first_block, first_block + -(-num_tokens // BLOCK_SIZE)))
    return Prompt(
        request_id=name,
        prompt_ids=[0] * num_tokens,
        sampling=SamplingParams(seed=0),
        max_tokens=1,
        positions=torch.empty(0),
        hand_off=True,
        blocks=blocks,
        states=[list(range(first_block + 50, first_block + 50 + state_blocks))] if state_blocks else [],
    )


def outgoing(sequence: Prompt, region_name: str, num_cached: int) -> OutgoingTransfer:
    blocks = sequence.blocks + sequence.state_blocks
    target = wire.ReserveReply([block + 1000 for block in blocks], num_cached, region_name)
    return OutgoingTransfer(sequence.request_id, target, next_block=num_cached)


@given(
    mode=st.sampled_from(["grouped", *LAYER_GROUPS]),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=3),
    chunk=st.integers(1, 20),
    num_layers=st.integers(1, 7),
    group=st.integers(1, 8),
    state_blocks=st.sampled_from([0, 0, 3]),
)
def test_what_arrives(
    mode: str, lengths: list[tuple[int, int, int]], chunk: int, num_layers: int, group: int, state_blocks: int
) -> None:
    sender: Any = Sender(num_layers, group)
    sequences = [prompt(f"s{i}", length, 100 * i, state_blocks) for i, (length, _, _) in enumerate(lengths)]
    transfers: dict[Prompt, OutgoingTransfer] = {}
    for sequence, (_, lane, cached) in zip(sequences, lengths, strict=True):
        num_cached = 0 if state_blocks else min(cached, len(sequence.blocks) - 1)
        transfers[sequence] = outgoing(sequence, f"d{lane}", num_cached)
    written: dict[tuple[str, int], set[int]] = {}
    push = KVPush(
        sender=sender,
        layout=wire.KVLayout(num_layers, 1, 1, BLOCK_SIZE, "float32", "m"),
        layer_bytes=8,
        device=get_device("cpu"),
        layer_groups=LAYER_GROUPS.get(mode, LayerGroups),
    )
    while any(sequence.num_uncomputed for sequence in sequences):
        prefills = [(s, min(chunk, s.num_uncomputed)) for s in sequences if s.num_uncomputed]
        groups = push.layer_groups(push, ScheduleOutput(prefills=prefills), transfers)
        for layer in range(num_layers):
            before = len(sender.pushes)
            groups.on_layer(layer)
            assert all(layers.stop == layer + 1 for layers, _ in sender.pushes[before:]), "no layer before its KV"
        groups.on_computed()
        for sequence, count in prefills:
            sequence.num_computed += count
            done = not sequence.num_uncomputed
            assert (transfers[sequence].computed_at is not None) == done
        for layers, parts in sender.pushes:
            assert len({part.transfer.target.name for part in parts}) == 1, "one write, one region"
            if any(part.local == one.state_blocks for part in parts for one in sequences):
                assert layers == range(num_layers) and sequences[0].num_computed, "a state is whole at the end"
            else:
                assert mode != "layerwise" or (len(parts), len(layers)) == (1, 1)
                assert mode != "oneshot" or layers == range(num_layers)
                assert mode != "grouped" or len(layers) <= group
            for part in parts:
                assert [block + 1000 for block in part.local] == list(part.remote)
                for layer in layers:
                    written.setdefault((part.transfer.transfer_id, layer), set()).update(part.local)
        if mode != "oneshot":
            sender.pushes.clear()
    for sequence in sequences:
        target = transfers[sequence].target
        own = sequence.blocks + sequence.state_blocks
        due = set() if target is None else set(own[target.num_cached_blocks :])
        for layer in range(num_layers):
            assert written.get((sequence.request_id, layer), set()) == due
    if mode == "oneshot":
        per_transfer = [part.transfer.transfer_id for _, parts in sender.pushes for part in parts]
        pieces = Counter(per_transfer).values()
        assert set(pieces) <= {2 if state_blocks else 1}, "a prompt goes out in one piece, its state in another"
