"""P's note on a prompt beside its answer, for logs: a header of ``/stage/prefill``'s answer."""

from __future__ import annotations

from collections.abc import Iterable

HEADER = "x-epd-prompt"


def write_prompt_note(num_tokens: int, had: Iterable[int]) -> str:
    """The header's value.

    Args:
        num_tokens: tokens of the prompt.
        had: numbers, from 0, of the request's items whose features P had before it asked for them.
    """
    return f"{num_tokens};{','.join(map(str, had))}"


def read_prompt_note(note: str) -> tuple[int | None, set[int]]:
    """The arguments of :func:`write_prompt_note`; None and an empty set for a text that it has not written."""
    number, _, had = note.partition(";")
    return (
        int(number) if number.isdecimal() else None,
        {int(index) for index in had.split(",") if index.isdecimal()},
    )
