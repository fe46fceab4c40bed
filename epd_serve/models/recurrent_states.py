"""Recurrent states of a language model's layers, stored in KV blocks of the sequence.

A layer with a state instead of K and V computes one sequence at a time, or one token for several sequences. Its
state is read from the sequence's blocks before and written back after. The blocks are allocated at admission, so
states are counted, forked, saved, sent and freed like KV, without additional memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from epd_serve.models.decoder import StepContext

#: Dtype of the words in which blocks are copied.
_WORD = torch.float32


class RecurrentStates:
    """Connects the stateful ``layers`` of a transformers model with the blocks of each sequence."""

    def __init__(self, model: Any, kv_dtype: torch.dtype) -> None:
        """Patch these layers of a model on its device."""
        config = model.config
        kinds = getattr(config, "layer_types", None) or ()
        self.layers = [index for index, kind in enumerate(kinds) if kind == "linear_attention"]
        self._num_planes: int = 2 * (config.num_hidden_layers - len(self.layers))  # K and V of each other layer
        self._kv_dtype = kv_dtype
        self._parts: list[_Part] = []
        self._places: tuple[Tensor, Tensor] | None = None
        self._memory: Tensor
        self._groups: list[_Group]
        for number, index in enumerate(self.layers):
            module = model.layers[index].linear_attn
            if not number:
                self._parts = _parts(module, index, config.hidden_size)
            module.forward = partial(self._forward, module.forward, number, index)

    def num_blocks(self, token_values: int, block_size: int) -> int:
        """Return the blocks for one sequence's state; ``token_values``: values of a token in K of one layer."""
        if not self.layers:
            return 0
        num_pieces = len(self.layers) * self._num_pieces(self._piece_words(token_values * block_size))
        return -(-num_pieces // self._num_planes)

    def begin(self, context: StepContext) -> None:
        """Prepare for the layers of a step."""
        assert context.states is not None, "a sequence without a state"
        meta = context.plan.meta
        planes = context.kv.flatten(0, 1).flatten(2)
        self._memory = planes.view(_WORD)
        count = self._num_pieces(self._memory.shape[2])
        if self._places is None or self._places[0].shape[1] != count:  # or another block size
            pieces = torch.arange(len(self.layers) * count, device=planes.device).view(-1, count)
            self._places = pieces % self._num_planes, pieces // self._num_planes
        self._groups = []
        if meta.num_decodes:
            self._groups.append(
                _Group(slice(0, meta.num_decodes), context.states[: meta.num_decodes], is_new=False)
            )
        row = meta.num_decodes
        chunks = zip(meta.prefill_query_lens, meta.prefill_context_lens, strict=True)
        for number, (count, length) in enumerate(chunks, start=meta.num_decodes):
            blocks = context.states[number : number + 1]
            self._groups.append(_Group(slice(row, row + count), blocks, is_new=count == length))
            row += count

    def _forward(
        self,
        forward: Callable[..., Tensor],
        number: int,
        index: int,
        hidden_states: Tensor,
        **arguments: Any,
    ) -> Tensor:
        """Run a layer's module on [1, tokens, hidden] of several sequences; returns the same shape."""
        assert self._places is not None, "begin() comes first"
        planes, places = (of_layers[number] for of_layers in self._places)
        outputs: list[Tensor] = []
        for group in self._groups:
            where = planes, group.blocks[:, places]
            state = self._memory[where]  # [sequences, pieces, words]: a copy for the layer to modify
            arguments["cache_params"] = self._cache(index, state.flatten(1), is_new=group.is_new)
            rows = hidden_states[0, group.rows].view(len(state), -1, hidden_states.shape[2])
            outputs.append(forward(rows, **arguments).flatten(0, 1))
            self._memory[where] = state
        return torch.cat(outputs)[None]

    def _cache(self, index: int, states: Tensor, *, is_new: bool) -> Cache:
        """Return a transformers cache whose layer ``index`` reads and writes ``states`` [sequences, words]."""
        layer = LinearAttentionLayer()
        start = 0
        for part in self._parts:
            values = states[:, start : start + part.num_words].view(part.dtype)[:, : math.prod(part.shape)]
            part.put(layer, values.view(-1, *part.shape))
            start += part.num_words
        layer.has_previous_state[0] = not is_new
        return Cache(layers=[layer] * (index + 1))

    def _piece_words(self, block_values: int) -> int:
        """Return the words of a block's K in one layer."""
        words, rest = divmod(block_values * self._kv_dtype.itemsize, _WORD.itemsize)
        if rest:
            raise ValueError(
                f"block_size: K of a block has {block_values} values; a recurrent state needs an even number"
            )
        return words

    def _num_pieces(self, piece_words: int) -> int:
        return -(-sum(part.num_words for part in self._parts) // piece_words)


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of a step with equal numbers of tokens: their rows, and state blocks [sequences, blocks].

    Blocks of new sequences are still empty.
    """

    rows: slice
    blocks: Tensor
    is_new: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of a layer's state; ``shape`` is per sequence."""

    is_convolution: bool
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_words(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // _WORD.itemsize)

    def put(self, layer: LinearAttentionLayer, states: Tensor) -> None:
        """Install it in the layer, which modifies it in place."""
        if self.is_convolution:
            layer.conv_states[0], layer.is_conv_states_initialized[0] = states, True
            layer.conv_kernel_size[0] = states.shape[-1]
        else:
            layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = states, True


def _parts(module: Any, index: int, hidden_size: int) -> list[_Part]:
    """Return the state tensors of a layer's module, found by computing a token."""
    weight = next(module.parameters())
    layer = LinearAttentionLayer()
    token = torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device)
    with torch.inference_mode():
        module(token, cache_params=Cache(layers=[layer] * (index + 1)))
    kept = ((True, layer.conv_states[0]), (False, layer.recurrent_states[0]))
    return [_Part(is_convolution, one.shape[1:], one.dtype) for is_convolution, one in kept if one is not None]
