"""Tiny models of real architectures with random weights, saved as transformers directories.

Their tokenizer is the built-in model's; their logits are spread out enough that float32 rounding changes no token.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import NORMALISATION, TEXT, TINY
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
)

from epd_serve.demo import weights_dir

KINDS = ("qwen2_5_vl", "qwen3_vl", "llava")
#: Those with recurrent states.
STATE_KINDS = ("qwen3_5", "qwen3_5_moe")
TEXT_KINDS = tuple(TEXT)
#: Those that take sounds; of these, those that take pictures as well.
AUDIO_KINDS = tuple(kind for kind, tiny in TINY.items() if tiny.audio and kind != "gemma4_moe")
OMNI_KINDS = ("qwen2_5_omni", "qwen3_omni")
#: Those with media tokens of their own, whose pictures are tiles or rows.
FAMILY_KINDS = tuple(kind for kind, tiny in TINY.items() if tiny.tokens and tiny.vision and kind not in OMNI_KINDS)
#: Those of other layouts than a kind that is tried each time.
_SLOW = {"pixtral", "llava_onevision", "glm4v_moe", "glm46v", "gemma4_moe", STATE_KINDS[1], *OMNI_KINDS}
ALL_KINDS, ALL_VIDEO_KINDS = (
    tuple(pytest.param(kind, marks=[pytest.mark.slow] if kind in _SLOW else []) for kind in kinds)
    for kinds in (
        (*KINDS, *STATE_KINDS, *OMNI_KINDS, *FAMILY_KINDS),
        ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4", "gemma4_unified", *OMNI_KINDS),
    )
)
#: Fields of every text config.
_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


#: As Qwen3.5's: thoughts between tags, tools as XML.
THINKING_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content or [] -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif -%}
{{- show(m.content) }}
{%- for call in m.tool_calls or [] -%}
{{- '\n' if not loop.first else '' }}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor -%}
{{- '</function>\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '\n</think>\n\n' }}{%- endif -%}
{%- endif -%}
"""


def make_tiny_model(kind: str, path: Path, *, seed: int = 0, thinks: bool = False, **text: Any) -> Path:
    """Build the model of a kind in ``path``. ``text`` overrides fields of the text config; ``thinks``: with
    THINKING_TEMPLATE and tokens for its tags."""
    tiny = TINY[kind]
    tokenizer: Any = AutoTokenizer.from_pretrained(weights_dir(), extra_special_tokens=tiny.named)
    tokenizer.add_tokens(tiny.tokens, special_tokens=True)
    if thinks:
        tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in tags])
    tokenizer.chat_template = THINKING_TEMPLATE if thinks else _template(tiny.shown)
    fields = {**_TEXT, "vocab_size": len(tokenizer), **tiny.text, **text}
    if fields.get("hidden_size_per_layer_input"):  # else transformers takes 262144 tokens, which are 150 MB
        fields["vocab_size_per_layer_input"] = len(tokenizer)
    towers = {"vision_config": tiny.vision, "audio_config": tiny.audio}
    parts = {name: tower for name, tower in towers.items() if tower}
    if parts:
        fields = {"text_config": fields, **parts}
    auto: Any = AutoModelForMultimodalLM if parts else AutoModelForCausalLM
    ids = {
        name: tokenizer.convert_tokens_to_ids(value) if re.search("_token_(id|index)$", name) else value
        for name, value in tiny.top.items()
    }
    torch.manual_seed(seed + tiny.seed)
    model = auto.from_config(AutoConfig.for_model(tiny.model_type, **fields, **ids), dtype=torch.float32)
    for parameter in model.parameters():
        if tiny.tokens and parameter.ndim == 2 and not parameter.any():  # a projector that begins with nothing
            torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if tiny.extractor:
        extractor = getattr(transformers, tiny.extractor)(feature_size=32, chunk_length=tiny.chunk_s)
        extractor.save_pretrained(path)
    file = path / "preprocessor_config.json"
    if tiny.preprocessor:
        extracted = json.loads(file.read_text()) if tiny.extractor else {}
        file.write_text(json.dumps({**extracted, **NORMALISATION, **tiny.preprocessor}))
    if tiny.processor:
        (path / "processor_config.json").write_text(json.dumps(tiny.processor))
    if tiny.videos:
        (path / "video_preprocessor_config.json").write_text(json.dumps(tiny.videos))
    return path


def _template(shown: dict[str, str]) -> str:
    """The built-in model's, with what is shown of an item of each modality."""
    template = (weights_dir() / "chat_template.jinja").read_text()
    begin, end = template.index("{%- if part['type'] in"), template.index("{%- endif -%}")
    branches = [f"{{%- elif part['type'] == '{kind}' -%}}{text}" for kind, text in shown.items()]
    return template[:begin] + "{%- if false -%}" + "".join(branches) + template[end:]
