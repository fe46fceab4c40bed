"""The block tables of the decodes of a step are those of its sequences, whoever came, went or moved before it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.engine.runner import DecodeTables, FollowedTables
from epd_serve.engine.step_inputs import StepInputs
from epd_serve.sequence import Sequence
from epd_serve.types import SamplingParams

SIZE = 4


def sequence(first: int) -> Sequence:
    blocks = list(range(first, first + 2))
    return Sequence(
        request_id="r",
        prompt_ids=[1],
        sampling=SamplingParams(seed=0),
        max_tokens=99,
        positions=None,
        blocks=blocks,
    )


def inputs(decode_blocks: torch.Tensor) -> StepInputs:
    nothing: list[int] = []
    return StepInputs(
        ids=nothing,
        positions=decode_blocks,
        slots=nothing,
        rows=nothing,
        decode_context_lens=nothing,
        decode_blocks=decode_blocks,
        prefill_query_lens=nothing,
        prefill_context_lens=nothing,
        prefill_blocks=[],
        features=None,
        feature_rows=nothing,
    )


@given(
    st.lists(st.tuples(st.sampled_from(["come", "go", "move", "same", "same"]), st.integers(0, 9)), max_size=60)
)
def test_tables_follow_their_sequences(events: list[tuple[str, int]]) -> None:
    tables, followed, first = DecodeTables(SIZE), FollowedTables(), 1
    decodes: list[Sequence] = []
    lens: dict[Sequence, int] = {}
    for event, number in events:
        if event == "come" or not decodes:
            decodes = [*decodes, sequence(first)]
            lens[decodes[-1]] = 1 + number % 8
        elif event == "go":
            decodes = [one for place, one in enumerate(decodes) if place != number % len(decodes)]
        elif event == "move":  # it was preempted, and its blocks are others
            one = decodes[number % len(decodes)]
            one.blocks = list(range(first, first + len(one.blocks)))
        else:
            for one in decodes:
                lens[one] += 1
                if lens[one] > SIZE * len(one.blocks):
                    one.blocks += [first]
        first += 10
        table = tables.blocks_of(decodes, [lens[one] for one in decodes])
        used = [one.blocks[: -(-lens[one] // SIZE)] for one in decodes]
        width = max(map(len, used), default=0)
        expected = np.array([row + [0] * (width - len(row)) for row in used], np.int64).reshape(len(used), width)
        np.testing.assert_array_equal(table, expected)
        sent = tables.change(inputs(torch.from_numpy(table)))
        assert sent.tables is not None
        assert not sent.decode_blocks.numel() and (event != "same" or len(sent.tables.writes) <= len(decodes))
        np.testing.assert_array_equal(followed.whole(sent).decode_blocks, expected)
