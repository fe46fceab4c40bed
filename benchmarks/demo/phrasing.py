"""Turns a template into a question the way one person or another would type it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.demo.scenes import Shape
from benchmarks.demo.wordings import PICTURES

ONE_WORD = ("color", "shape", "shape at", "count", "count some", "exists", "is color", "background")


def with_article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def describe(shapes: Sequence[Shape]) -> str:
    """The shapes in one phrase: "a red circle, a blue square and a green triangle"."""
    names = [with_article(f"{shape.color} {shape.kind}") for shape in shapes]
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def at(position: str, rng: random.Random) -> str:
    if position == "center":
        return rng.choice(("in the center", "at the center", "in the middle", "in the centre"))
    if position in ("left", "right"):
        return rng.choice((f"on the {position}", f"at the {position}", f"on the {position} side"))
    if position in ("top", "bottom"):
        return rng.choice((f"at the {position}", f"on the {position}", f"in the {position}"))
    return rng.choice(
        (f"at the {position}", f"in the {position}", f"in the {position} corner", f"on the {position}")
    )


def fill(template: str, slots: dict[str, str], rng: random.Random) -> str:
    words = {"color": rng.choice(("color", "color", "colour")), "pic": rng.choice(PICTURES)}
    text = template.format_map({**words, **slots})
    return text[0].upper() + text[1:]


def style(text: str, kind: str, rng: random.Random) -> str:
    """Rewrite a question in one of the ways in which people type."""
    if rng.random() < 0.08:
        text = _drop_small_words(text, rng)
    if rng.random() < 0.06:
        opening = rng.choice(
            ("Look at the {pic}. ", "Look at this {pic}. ", "Please answer: ", "Hi! ", "Question: ")
        )
        text = opening.format(pic=rng.choice(PICTURES)) + text
    text = plain(text, rng)
    if rng.random() < 0.15:
        endings = ["Answer briefly.", "Be brief.", "Give a short answer."]
        if kind in ONE_WORD or kind.startswith("single"):
            endings += ["Answer in one word.", "Answer in one word.", "Answer with one word.", "One word only."]
        text = f"{text if text[-1] in '.?' else text + '.'} {rng.choice(endings)}"
    return text


def plain(text: str, rng: random.Random) -> str:
    if rng.random() < 0.25:
        text = text.rstrip(".?!")
    if rng.random() < 0.25:
        text = text.lower()
    return text


def _drop_small_words(text: str, rng: random.Random) -> str:
    small = {"is", "the", "are", "there", "does", "do", "you", "in", "this"}
    kept = [word for word in text.split() if word.lower() not in small or rng.random() < 0.5]
    return " ".join(kept)
