"""The demo model's tokenizer (byte-level BPE over its own questions) and its chat template."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.questions import image_question
from benchmarks.demo.scenes import random_layout
from benchmarks.demo.text_questions import text_question

VOCABULARY_SIZE = 768
PAD, EOS, IMAGE = "<|endoftext|>", "<|im_end|>", "<|image_pad|>"
SPECIAL_TOKENS = (
    PAD,
    "<|im_start|>",
    EOS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    IMAGE,
    "<|video_pad|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}{{ '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] | trim }}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- endif -%}
{%- endfor -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] == 'text' -%}
{{ part['text'] | trim }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant{{ '\\n' }}
{%- endif -%}
"""


def train_tokenizer(seed: int = 1) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges come from a sample of the training questions; every digit is its own token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(random.Random(seed)), trainer)
    return _wrap(tokenizer)


def load_tokenizer(weights: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved with the weights, free of traces of where it was loaded from."""
    return _wrap(Tokenizer.from_file(str(weights / "tokenizer.json")))


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE, padding_side="left"
    )


def _corpus(rng: random.Random) -> Iterator[str]:
    for _ in range(9000):
        layout = random_layout(rng)
        for question in (image_question(layout, rng), image_question(layout, rng), text_question(rng)):
            yield question.text
            yield question.answer
        yield "system\nYou are a helpful assistant.\nuser\nassistant\n"
