"""A step as plain data, so that every rank of an instance can compute its share of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from device.copies import to_device
from epd_serve.engine.decode_tables import TableChange


class StepInputs(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The packed tokens of a step, on the host: decodes first, then prefill chunks.

    Attributes:
        positions: [axes, tokens of prefills] int64; each rank's device makes those of decodes.
        slots: [tokens of prefills], where each token's K and V go.
        rows: tokens whose logits are wanted. scored_rows: tokens behind which the log-probabilities of
            ``scored_ids``, those that follow them, are wanted, with ``num_top`` alternatives.
        decodes: what is new in their tables, of which each rank keeps its own.
        prefill_blocks: the blocks in use of each sequence, as many as its context fills.
        prefill_both_ways: for each prefill, the runs of its sequence's tokens that see all of themselves.
        features: [F, (1 + deepstack levels) * hidden], in batch order; None without media. Ranks that are not the
            first have their shape, on torch's device ``meta``.
        feature_rows: [F], the tokens that they replace.
        states: the blocks of the recurrent state of each sequence, decodes first; empty where there are none.
        fed_rows: tokens that the first rank's device has chosen in the step before and the host does not know.
    """

    ids: list[int]
    positions: Tensor
    slots: list[int]
    rows: list[int]
    decode_context_lens: list[int]
    decodes: TableChange
    prefill_query_lens: list[int]
    prefill_context_lens: list[int]
    prefill_blocks: list[list[int]]
    features: Tensor | None
    feature_rows: list[int]
    scored_rows: list[int] = []
    scored_ids: list[int] = []
    num_top: int = 0
    prefill_both_ways: list[list[tuple[int, int]]] = []
    states: list[list[int]] = []
    fed_rows: list[int] = []


@dataclass(frozen=True, slots=True)
class Fed:
    """Tokens [len(rows)] on the device that take the places of some of a step's ids."""

    rows: list[int]
    tokens: Tensor

    def put(self, ids: Tensor) -> None:
        if self.rows[-1] == len(self.rows) - 1:  # the first ones, as in a step of decodes
            ids[: len(self.rows)].copy_(self.tokens)
        else:
            ids.index_copy_(0, on_device(ids, self.rows), self.tokens)


def on_device(like: Tensor, values: list[int] | list[float], dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers on a tensor's device."""
    return to_device(torch.tensor(values, dtype=dtype), like.device)


def integers(values: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.long), device)


def block_table(rows: list[list[int]]) -> Tensor:
    """[len(rows), longest row] int32 on the host, padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = blocks
    return torch.from_numpy(table)
