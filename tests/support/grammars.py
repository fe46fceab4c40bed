"""Texts that a grammar accepts."""

from __future__ import annotations

from typing import Any


def is_allowed(mask: Any, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def accepts(constraint: Any, text: str, tokenizer: Any) -> bool:
    """Whether a constraint that has seen nothing lets the text pass, token by token, and may end behind it."""
    constraint, ids = constraint.fork(), tokenizer.encode(text, add_special_tokens=False)
    return all(
        is_allowed(constraint.allowed(ids[:count]), token)
        for count, token in enumerate([*ids, tokenizer.eos_token_id])
    )
