"""Text of a given number of tokens, without a tokenizer."""

from __future__ import annotations

from random import Random

#: Each is one token of the built-in model, and of the byte-level vocabularies of Qwen, Llama and GPT, when a blank
#: stands before it.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "on", "that", "this", "with", "you", "it", "are", "from", "at"),
    *("your", "all", "have", "can", "about", "has", "one", "do", "no", "what", "which", "there", "only", "any"),
)


def text_of(num_tokens: int, rng: Random) -> str:
    """Words that make about ``num_tokens`` tokens; at least one word."""
    return " ".join(rng.choices(WORDS, k=max(num_tokens, 1)))
