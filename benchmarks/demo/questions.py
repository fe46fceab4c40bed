"""Questions about a scene, with the one answer to each that counts as right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.demo.phrasing import at, describe, fill, style, with_article
from benchmarks.demo.scenes import COLORS, POSITIONS, SHAPES, Layout, Shape
from benchmarks.demo.wordings import IMAGE_WORDINGS, Wordings

IMAGE_KINDS = {
    "color": 5,
    "shape": 4,
    "shape at": 3,
    "count": 2,
    "count some": 14,
    "exists": 4,
    "is color": 5,
    "background": 2,
    "where": 7,
    "what at": 7,
    "describe": 6,
    "single shape": 4,
    "single color": 4,
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a named kind and the only answer that counts as right."""

    kind: str
    text: str
    answer: str


def image_question(layout: Layout, rng: random.Random) -> Question:
    """A question, in words seen in training, that the scene answers."""
    while True:
        kind = rng.choices(list(IMAGE_KINDS), list(IMAGE_KINDS.values()))[0]
        question = image_question_of(kind, layout, rng)
        if question is not None:
            return question


def image_question_of(
    kind: str, layout: Layout, rng: random.Random, wordings: Wordings = IMAGE_WORDINGS
) -> Question | None:
    """A question of this kind, or None where the scene leaves no clear one to ask."""
    found = _ASK[kind](layout, rng)
    if found is None:
        return None
    slots, answer = found
    text = fill(rng.choice(wordings[kind]), slots, rng)
    return Question(kind=kind, text=style(text, kind, rng), answer=answer)


Asked = tuple[dict[str, str], str] | None


def _ask_color(layout: Layout, rng: random.Random) -> Asked:
    if rng.random() < 0.2:
        shape = rng.choice(layout.shapes)
        return {"x": f"{rng.choice(('shape', 'object', 'one'))} {at(shape.position, rng)}"}, shape.color
    alone = _alone(layout, "kind")
    if not alone:
        return None
    shape = rng.choice(alone)
    return {"x": shape.kind}, shape.color


def _ask_shape(layout: Layout, rng: random.Random) -> Asked:
    alone = _alone(layout, "color")
    if not alone:
        return None
    shape = rng.choice(alone)
    return {"c": shape.color}, shape.kind


def _ask_shape_at(layout: Layout, rng: random.Random) -> Asked:
    shape = rng.choice(layout.shapes)
    return {"at": at(shape.position, rng)}, shape.kind


def _ask_count(layout: Layout, rng: random.Random) -> Asked:
    return {}, str(len(layout.shapes))


def _ask_count_some(layout: Layout, rng: random.Random) -> Asked:
    noun, matches = _matching(layout, rng)
    return {"xs": f"{noun}s"}, str(matches)


def _ask_exists(layout: Layout, rng: random.Random) -> Asked:
    noun, matches = _matching(layout, rng)
    return {"ax": with_article(noun), "xs": f"{noun}s"}, "yes" if matches else "no"


def _ask_is_color(layout: Layout, rng: random.Random) -> Asked:
    alone = _alone(layout, "kind")
    if not alone:
        return None
    shape = rng.choice(alone)
    color = shape.color if rng.random() < 0.5 else _other_color(layout, rng)
    return {"shape": shape.kind, "c": color}, "yes" if color == shape.color else "no"


def _ask_background(layout: Layout, rng: random.Random) -> Asked:
    return {}, layout.background


def _ask_where(layout: Layout, rng: random.Random) -> Asked:
    by_kind, by_color = _alone(layout, "kind"), _alone(layout, "color")
    by_both = [
        s for s in layout.shapes if sum(o.kind == s.kind and o.color == s.color for o in layout.shapes) == 1
    ]
    names = (
        [s.kind for s in by_kind]
        + [f"{s.color} shape" for s in by_color]
        + [f"{s.color} {s.kind}" for s in by_both]
    )
    shapes = by_kind + by_color + by_both
    if not names:
        return None
    pick = rng.randrange(len(names))
    return {"x": names[pick]}, shapes[pick].position


def _ask_what_at(layout: Layout, rng: random.Random) -> Asked:
    if rng.random() < 0.12:
        empty = _empty_positions(layout)
        if empty:
            return {"at": at(rng.choice(empty), rng)}, "nothing"
    shape = rng.choice(layout.shapes)
    return {"at": at(shape.position, rng)}, describe([shape])


def _ask_describe(layout: Layout, rng: random.Random) -> Asked:
    return {}, describe(layout.shapes)


def _ask_single_shape(layout: Layout, rng: random.Random) -> Asked:
    return ({}, layout.shapes[0].kind) if len(layout.shapes) == 1 else None


def _ask_single_color(layout: Layout, rng: random.Random) -> Asked:
    return ({}, layout.shapes[0].color) if len(layout.shapes) == 1 else None


_ASK: dict[str, Callable[[Layout, random.Random], Asked]] = {
    "color": _ask_color,
    "shape": _ask_shape,
    "shape at": _ask_shape_at,
    "count": _ask_count,
    "count some": _ask_count_some,
    "exists": _ask_exists,
    "is color": _ask_is_color,
    "background": _ask_background,
    "where": _ask_where,
    "what at": _ask_what_at,
    "describe": _ask_describe,
    "single shape": _ask_single_shape,
    "single color": _ask_single_color,
}


def _alone(layout: Layout, attribute: str) -> list[Shape]:
    """The shapes that no other shape of the scene equals in the attribute."""
    values = [getattr(shape, attribute) for shape in layout.shapes]
    return [shape for shape, value in zip(layout.shapes, values, strict=True) if values.count(value) == 1]


def _other_color(layout: Layout, rng: random.Random) -> str:
    """A colour, as likely as not one that the scene shows."""
    seen = [shape.color for shape in layout.shapes]
    return rng.choice(seen if rng.random() < 0.4 else list(COLORS))


def _matching(layout: Layout, rng: random.Random) -> tuple[str, int]:
    """A noun such as "circle", "red shape" or "red circle", and how many shapes it fits."""
    shape = rng.choice(layout.shapes)
    kind = shape.kind if rng.random() < 0.6 else rng.choice(SHAPES)
    color = shape.color if rng.random() < 0.6 else _other_color(layout, rng)
    form = rng.randrange(3)
    if form == 0:
        return kind, sum(s.kind == kind for s in layout.shapes)
    if form == 1:
        return f"{color} {rng.choice(('shape', 'object'))}", sum(s.color == color for s in layout.shapes)
    return f"{color} {kind}", sum(s.kind == kind and s.color == color for s in layout.shapes)


def _empty_positions(layout: Layout) -> list[str]:
    """Positions with nothing near: an edge word such as "left" only where its whole row or column is empty."""
    taken = {(shape.row, shape.column) for shape in layout.shapes}
    rows, columns = {row for row, _ in taken}, {column for _, column in taken}
    empty = []
    for row in range(3):
        for column in range(3):
            if (row == 1) == (column == 1):
                free = (row, column) not in taken
            else:
                free = row not in rows if column == 1 else column not in columns
            if free:
                empty.append(POSITIONS[row][column])
    return empty
