"""Tokenizer, chat template and grammars of a checkpoint, with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from epd_serve.engine.grammar import Grammars
from epd_serve.instance.bounded_tokenizer import BoundedTokenizer
from epd_serve.instance.chat_template import ChatTemplate, MediaLiterals
from epd_serve.instance.detokenizer import Vocabulary
from epd_serve.instance.prompt import Texts
from epd_serve.models.family import Family


def read_texts(path: Path, family: Family, eos_token_ids: frozenset[int] = frozenset()) -> Texts:
    """Raises ValueError for a tokenizer with tokens that the model has not, or a template that shows nothing."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not tokenizer("a", add_special_tokens=False).input_ids:
        raise ValueError(f"{path}: its tokenizer makes no token of a letter; copy its files from the model")
    vocab_size = family.config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"{path}: vocab_size is {vocab_size}, but its tokenizer has {len(tokenizer)} "
            "tokens; the model must have them all"
        )
    literals = MediaLiterals(tokenizer, family.config, family.tokens)
    template = ChatTemplate(tokenizer, path, literals)
    if family.shown and isinstance(tokenizer.chat_template, str):
        token = tokenizer.convert_ids_to_tokens(family.image_token_id)
        tokenizer.chat_template = tokenizer.chat_template.replace(family.shown, token)
    return Texts(
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer),
        grammars=Grammars(tokenizer, eos_token_ids),
        bounded=BoundedTokenizer(tokenizer),
        template=template,
        literals=literals,
    )
