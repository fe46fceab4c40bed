"""Whole engine steps of real model shapes, two layers deep, on fake tensors of npu:0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_ladder import require_torch_npu
from ascend_recorder import NpuRecorder

require_torch_npu()

import torch  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from transformers import (  # noqa: E402
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from device.ascend import AscendDevice  # noqa: E402
from device.base import EagerRunner, GraphRunner  # noqa: E402
from epd_serve.engine.step import StepExecutor  # noqa: E402
from epd_serve.engine.step_inputs import DecodeTables, StepInputs  # noqa: E402
from epd_serve.models import language  # noqa: E402
from epd_serve.models.language import LanguageModel  # noqa: E402

LAYERS, BLOCK_SIZE, NUM_BLOCKS, VOCAB = 2, 128, 32, 1000
SMALL_TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}


def _text(**fields: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    fields["rope_parameters"] = rope | fields.pop("rope")
    return {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "bos_token_id": 0, "eos_token_id": 2, **fields}


MODELS: dict[str, Any] = {
    "Qwen2.5-VL-7B": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=_text(
                hidden_size=3584,
                intermediate_size=18944,
                num_attention_heads=28,
                num_key_value_heads=4,
                rope={"mrope_section": [16, 24, 24]},
            ),
            vision_config=SMALL_TOWER | {"out_hidden_size": 3584, "fullatt_block_indexes": [0]},
        )
    ),
    "Qwen3-VL-8B": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=_text(
                hidden_size=4096,
                intermediate_size=12288,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=128,
                rope={"mrope_section": [24, 20, 20], "mrope_interleaved": True},
            ),
            vision_config=SMALL_TOWER | {"out_hidden_size": 4096, "deepstack_visual_indexes": [0]},
        )
    ),
}


class TensorsFromHost(TorchFunctionMode):
    """torch.tensor(..., device="npu:0") would initialise CANN, even for a fake tensor; copying one does not.
    Pinned memory is unknown to fake tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)


class EagerNPU(AscendDevice):
    """Fake tensors have nothing to capture."""

    def graph_runner(self) -> GraphRunner:
        return EagerRunner()


def moved(embedding: torch.nn.Embedding, device: torch.device) -> torch.nn.Embedding:
    """As Module.to, for which torch_npu initialises the device and torch exchanges fake parameters' insides."""
    embedding.weight = torch.nn.Parameter(embedding.weight.to(device), requires_grad=False)
    return embedding


@pytest.fixture(params=MODELS)
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepExecutor]:
    # Fake mode computes with tensors of one element for real.
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1)
    with fake_tensor.FakeTensorMode(), TensorsFromHost():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = MODELS[request.param]().eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)
        monkeypatch.setattr(language, "load_part", lambda *_: model)  # loading a checkpoint is not the point
        monkeypatch.setattr(torch.nn.Embedding, "to", moved)
        device = EagerNPU(0)
        loaded = LanguageModel(Path(), torch.bfloat16, device)
        kv = torch.empty(
            (LAYERS, 2, NUM_BLOCKS, BLOCK_SIZE, loaded.num_kv_heads, loaded.head_dim),
            dtype=torch.bfloat16,
            device=device.torch_device,
        )
        yield StepExecutor(
            loaded, device, kv, num_position_axes=3, graph_sizes=[8], max_num_seqs=8, max_model_len=2048
        )


def inputs_of(decodes: list[int], chunks: list[tuple[int, int]], features: torch.Tensor | None) -> StepInputs:
    tokens = sum(query for query, _ in chunks)
    blocks = [list(range(1, 2 + (n - 1) // BLOCK_SIZE)) for n in (*decodes, *(context for _, context in chunks))]
    return StepInputs(
        ids=[1] * (len(decodes) + tokens),
        positions=torch.zeros(3, tokens, dtype=torch.long),
        slots=[BLOCK_SIZE] * tokens,
        rows=list(range(len(decodes) + len(chunks))),
        decode_context_lens=decodes,
        decodes=DecodeTables(BLOCK_SIZE, 8).change(blocks[: len(decodes)], decodes, [0] * len(decodes)),
        prefill_query_lens=[query for query, _ in chunks],
        prefill_context_lens=[context for _, context in chunks],
        prefill_blocks=blocks[len(decodes) :],
        features=features,
        feature_rows=[] if features is None else list(range(len(features))),
    )


STEPS = {
    "prefill": ([], [(300, 300), (17, 400)], 0),
    "prefill with images": ([], [(300, 300)], 64),
    "decode": ([1, 128, 1500], [], 0),
    "mixed": ([77], [(128, 256)], 64),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_passes(step: str, executor: StepExecutor) -> None:
    decodes, chunks, image_tokens = STEPS[step]
    hidden = executor._model.hidden_size
    levels = 2 if hidden == 4096 else 1  # Qwen3-VL has one deepstack level here
    features = torch.empty(image_tokens, levels * hidden, dtype=torch.bfloat16) if image_tokens else None
    with NpuRecorder("shape") as recorder:
        logits = executor.compute(inputs_of(decodes, chunks, features))
    assert logits.shape == (len(decodes) + len(chunks), VOCAB) and logits.device.type == "npu"
    head_norms = 2 * LAYERS if hidden == 4096 else 0
    assert Counter(recorder.calls) == {
        "npu_rms_norm": 1 + head_norms,
        "npu_add_rms_norm": 2 * LAYERS,
        "npu_rotary_mul": 2 * LAYERS,
        "npu_scatter_pa_kv_cache": LAYERS,
        "npu_fused_infer_attention_score_v2": LAYERS * (bool(decodes) + bool(chunks)),
        "npu_swiglu": LAYERS,
    }
