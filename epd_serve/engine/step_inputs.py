"""A step as plain data, so that every rank of an instance can compute its share of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from device.base import AttnMeta
from device.copies import to_device


class TableChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The block tables of a step's decodes, by what is new in them since the step before.

    Attributes:
        width: blocks of the longest. rows: of each decode, in a table that all steps share.
        writes: (row, first place, blocks); from place 0 on, the row was another's.
    """

    width: int
    rows: list[int]
    writes: list[tuple[int, int, list[int]]]


class StepInputs(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The packed tokens of a step, on the host: decodes first, then prefill chunks.

    Attributes:
        positions: [axes, T] int64.
        slots: [T], where each token's K and V go.
        rows: tokens whose logits are wanted. scored_rows: tokens behind which the log-probabilities of
            ``scored_ids``, those that follow them, are wanted, with ``num_top`` alternatives.
        decode_blocks: [decodes, widest] int64, the blocks in use of each sequence, then 0 (:func:`block_table`).
        prefill_blocks: the blocks in use of each sequence, as many as its context fills.
        prefill_both_ways: for each prefill, the runs of its sequence's tokens that see all of themselves.
        features: [F, (1 + deepstack levels) * hidden], in batch order; None without media. Ranks that are not the
            first have their shape, on torch's device ``meta``.
        feature_rows: [F], the tokens that they replace.
        states: the blocks of the recurrent state of each sequence, decodes first; empty where there are none.
        fed_rows: tokens that the first rank's device has chosen in the step before and the host does not know.
        tables: in place of ``decode_blocks`` on the way to another rank.
    """

    ids: list[int]
    positions: Tensor
    slots: list[int]
    rows: list[int]
    decode_context_lens: list[int]
    decode_blocks: Tensor
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
    tables: TableChange | None = None

    def meta(self, block_size: int, device: torch.device) -> AttnMeta:
        return AttnMeta(
            block_size=block_size,
            slot_mapping=integers(self.slots, device),
            num_decodes=len(self.decode_context_lens),
            decode_block_table=to_device(self.decode_blocks, device),
            decode_context_lens=integers(self.decode_context_lens, device),
            decode_context_lens_host=self.decode_context_lens,
            prefill_query_lens=self.prefill_query_lens,
            prefill_context_lens=self.prefill_context_lens,
            prefill_block_table=to_device(block_table(self.prefill_blocks), device),
        )


@dataclass(frozen=True, slots=True)
class Fed:
    """Tokens [len(rows)] on the device that take the places of some of a step's ids."""

    rows: list[int]
    tokens: Tensor

    def put(self, ids: Tensor) -> None:
        ids.index_copy_(0, on_device(ids, self.rows), self.tokens)


def on_device(like: Tensor, values: list[int] | list[float], dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers on a tensor's device."""
    return to_device(torch.tensor(values, dtype=dtype), like.device)


def integers(values: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.long), device)


def block_table(rows: list[list[int]]) -> Tensor:
    """[len(rows), longest row] int64 on the host, padded with 0."""
    width = max(map(len, rows), default=0)
    padded = [row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.long).view(len(rows), width)
