"""Our decoder against transformers' own forward pass, for every kind of layer that it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from device.base import AttnMeta
from device.registry import get_device
from epd_serve.models.decoder import StepContext
from epd_serve.models.language import LanguageModel

LENGTH, BLOCK_SIZE = 23, 4
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def _llava(path: Path, model_type: str, **text: Any) -> Any:
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={**TEXT, "model_type": model_type, **text},
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "projection_dim": 32,
            },
            image_token_index=5,
        )
    ).eval()
    model.save_pretrained(path)
    return model


def _logits(path: Path, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits of all tokens, by our model: a chunk of ten, then the rest."""
    device = get_device("cpu")
    model = LanguageModel(path, torch.float32, device)
    num_blocks = -(-LENGTH // BLOCK_SIZE) + 1
    kv = torch.zeros(model.num_layers, 2, num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    table = torch.arange(num_blocks - 1, 0, -1, dtype=torch.int32)[None]
    slots = (table[0, :, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
    outputs: list[Tensor] = []
    for start, end in ((0, 10), (10, LENGTH)):
        meta = AttnMeta(
            block_size=BLOCK_SIZE,
            slot_mapping=slots[start:end],
            num_decodes=0,
            decode_block_table=torch.zeros(0, 0, dtype=torch.int32),
            decode_context_lens=torch.zeros(0, dtype=torch.long),
            decode_context_lens_host=[],
            prefill_query_lens=[end - start],
            prefill_context_lens=[end],
            prefill_block_table=table,
        )
        context = StepContext(plan=device.ops.prepare(meta, torch.float32), kv=kv)
        outputs.append(model.forward(ids[start:end], positions[:, start:end], context))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("mistral", {"sliding_window": None, "head_dim": 24}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, model_type: str, text: dict[str, Any]) -> None:
    whole = _llava(tmp_path, model_type, **text)
    ids = torch.randint(6, 96, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = whole(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(_logits(tmp_path, ids, torch.arange(LENGTH)[None]), expected, rtol=1e-4, atol=1e-4)


def test_mixture_of_experts_layers_stay_what_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(
            text_config={
                **TEXT,
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "mlp_only_layers": [1],
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4},
            },
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=5,
        )
    ).eval()
    whole.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, 96, (LENGTH,), generator=generator)
    positions = torch.randint(0, 40, (3, LENGTH), generator=generator)
    with torch.inference_mode():
        expected = whole(
            input_ids=ids[None], position_ids=positions[:, None], attention_mask=torch.ones(1, LENGTH)
        ).logits[0]
    torch.testing.assert_close(_logits(tmp_path, ids, positions), expected, rtol=1e-4, atol=1e-4)


def test_a_window_bounds_the_context(tmp_path: Path) -> None:
    """Inside its window, sliding attention is full attention."""
    _llava(tmp_path, "mistral", sliding_window=50)
    assert LanguageModel(tmp_path, torch.float32, get_device("cpu")).max_model_len == 50


@pytest.mark.parametrize(
    ("model_type", "text", "message"),
    [
        ("gemma", {}, "does not run the language model 'gemma'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "at any length of the context",
        ),
    ],
)
def test_what_the_decoder_would_compute_wrongly_is_refused(
    tmp_path: Path, model_type: str, text: dict[str, Any], message: str
) -> None:
    _llava(tmp_path, model_type, **text)
    with pytest.raises(ValueError, match=message):
        LanguageModel(tmp_path, torch.float32, get_device("cpu"))
