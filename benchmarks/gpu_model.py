"""Layer operators, and a whole decode step of Qwen2.5-VL-7B's language model (random weights) as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accelerator import Target
from benchmarks.gpu_timing import graph_ms, host_ms, replay_ms
from device.base import AttentionOps, AttnMeta, Device
from device.ops.plain import PlainOps
from epd_serve.models.decoder import Decoder, StepContext

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS, VOCABULARY = 3584, 28, 4, 128, 18944, 28, 152064
MROPE_SECTION = [16, 24, 24]
BLOCK_SIZE = 16
DECODES = [(1, 2048), (8, 2048), (64, 2048)]
LAYER_TOKENS = [64, 4096]


def measure_layers(device: Device) -> dict[str, Any]:
    """Milliseconds of each operator between the matrix products, ours and plain torch's, by number of tokens."""
    results: dict[str, Any] = {}
    for tokens in LAYER_TOKENS:
        for name, ops in (("ours", device.ops), ("torch", PlainOps())):
            for operator, call in layer_calls(ops, tokens, device.torch_device).items():
                results.setdefault(f"{operator}, {tokens} tokens", {})[name] = graph_ms([call] * 8)
    return results


def layer_calls(ops: AttentionOps, tokens: int, where: torch.device) -> dict[str, Callable[[], object]]:
    """The operators between the matrix products of Qwen2.5-VL-7B, by name."""
    hidden, residual = torch.randn(2, tokens, HIDDEN, dtype=torch.bfloat16, device=where).unbind(0)
    weight = torch.randn(HIDDEN, dtype=torch.bfloat16, device=where)
    fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=where)
    query, key = fused[:, :HEADS], fused[:, HEADS : HEADS + KV_HEADS]
    cos, sin = torch.rand(2, tokens, HEAD_DIM, device=where).unbind(0)
    gate_up = torch.randn(tokens, 2 * FEED_FORWARD, dtype=torch.bfloat16, device=where)
    return {
        "rms_norm": partial(ops.rms_norm, hidden, weight, 1e-6),
        "add_rms_norm": partial(ops.add_rms_norm, hidden, residual, weight, 1e-6),
        "rotary": partial(ops.rotary, query, key, cos, sin),
        "swiglu": partial(ops.swiglu, gate_up),
    }


class _Model:
    """The decoder, an embedding and a head, all random: 7.6 billion parameters in bfloat16."""

    def __init__(self, device: Device) -> None:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

        config = Qwen2_5_VLTextConfig(
            vocab_size=128,  # ours, of the true size, are below
            hidden_size=HIDDEN,
            intermediate_size=FEED_FORWARD,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            rope_parameters={"rope_type": "default", "mrope_section": MROPE_SECTION, "rope_theta": 1e6},
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device.torch_device:
                model = Qwen2_5_VLTextModel(config)
        finally:
            torch.set_default_dtype(default)
        self.ops: AttentionOps = device.ops
        self.decoder = Decoder(model, device.ops, device.torch_device)
        weights = torch.randn(2, VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device.torch_device) * 0.02
        self.embedding, self.head = weights.unbind(0)
        layer = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * FEED_FORWARD
        self.weight_bytes = 2 * (LAYERS * layer + VOCABULARY * HIDDEN)

    def step(self, inputs: _Inputs) -> Tensor:
        """Logits [B, vocabulary] of one decode step; reads its inputs from static tensors."""
        plan = self.ops.prepare(inputs.meta, torch.bfloat16)
        context = StepContext(plan=plan, kv=inputs.kv)
        hidden = self.decoder.forward(F.embedding(inputs.ids, self.embedding), inputs.positions, context)
        return F.linear(hidden, self.head).float()


class _Inputs:
    """The static tensors of a batch over shuffled blocks."""

    def __init__(self, batch: int, context: int, where: torch.device) -> None:
        blocks = batch * context // BLOCK_SIZE
        shape = (LAYERS, 2, blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.kv = torch.empty(shape, dtype=torch.bfloat16, device=where).normal_()
        self.ids = torch.randint(VOCABULARY, (batch,), device=where)
        self.table = torch.randperm(blocks, device=where, dtype=torch.int32).view(batch, -1) + 1
        self.lengths = torch.full((batch,), context, dtype=torch.int64, device=where)
        self.slots = torch.empty_like(self.lengths)
        self.positions = torch.empty(3, batch, dtype=torch.int64, device=where)
        self.set_lengths(self.lengths.clone())
        self.meta = AttnMeta(
            block_size=BLOCK_SIZE,
            slot_mapping=self.slots,
            num_decodes=batch,
            decode_block_table=self.table,
            decode_context_lens=self.lengths,
            decode_context_lens_host=[context] * batch,
            prefill_query_lens=[],
            prefill_context_lens=[],
            prefill_block_table=self.table[:0],
        )

    def set_lengths(self, lengths: Tensor) -> None:
        last = lengths - 1
        blocks = self.table.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0]
        self.lengths.copy_(lengths)
        self.slots.copy_(blocks * BLOCK_SIZE + last % BLOCK_SIZE)
        self.positions.copy_(last.expand(3, -1))


@torch.inference_mode()
def measure_model(device: Device, copy_gb_s: float) -> tuple[dict[str, Any], list[Target]]:
    """For each batch: captured against eager, the same logits in how much time; against the bytes it must read."""
    model = _Model(device)
    results: dict[str, Any] = {"weight_bytes": model.weight_bytes}
    targets: list[Target] = []
    for batch, context in DECODES:
        name = f"{batch} x {context}"
        row = _measure_step(model, device, batch, context)
        speed = row["read_bytes"] / row["graph_ms"] / 1e6
        results[name] = row | {"gb_s": speed, "of_copy": speed / copy_gb_s}
        difference, same = row["largest_relative_difference"], row["same_tokens"]
        step = f"captured decode step {name}"
        targets += [
            Target(name=f"{step}, difference to eager", measured=difference, required=1e-2, at_least=False),
            Target(name=f"{step}, share of equal tokens", measured=same, required=0.9, at_least=True),
        ]
    return results, targets


def _measure_step(model: _Model, device: Device, batch: int, context: int) -> dict[str, Any]:
    inputs = _Inputs(batch, context, device.torch_device)
    step = partial(model.step, inputs)
    runner = device.graph_runner()
    runner.capture(batch, step)
    differences: list[float] = []
    same: list[float] = []
    # Once as captured, then with other lengths and tokens in the same buffers.
    for lengths in (inputs.lengths.clone(), torch.randint_like(inputs.lengths, 1, context + 1)):
        inputs.set_lengths(lengths)
        inputs.ids.copy_(torch.randint_like(inputs.ids, VOCABULARY))
        runner.update(batch, lengths.tolist())
        replayed, eager = runner.replay(batch).clone(), step()
        differences.append(float((replayed - eager).abs().max() / eager.abs().max()))
        same.append(float((replayed.argmax(-1) == eager.argmax(-1)).float().mean()))
    inputs.set_lengths(torch.full_like(inputs.lengths, context))
    graph_ms = replay_ms(partial(runner.replay, batch))
    return {
        "graph_ms": graph_ms,
        "eager_ms": min(host_ms(step) for _ in range(3)),
        "tokens_s": batch / graph_ms * 1e3,
        "read_bytes": model.weight_bytes + inputs.kv.numel() * inputs.kv.element_size(),
        "largest_relative_difference": max(differences),
        "same_tokens": min(same),
    }
