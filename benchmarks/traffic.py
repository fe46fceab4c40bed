"""Mixed requests of users, and the report of a traffic of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from epd_serve.verify.items import asked, noise
from epd_serve.verify.traffic import Outcome, Request, Traffic

_NUM_PICTURES = 24
_QUESTIONS = (
    "What color is the circle?",
    "What is in the picture?",
    "How many shapes are there?",
    "Where is the blue square?",
)
_TEXTS = ("What is the capital of France?", "Count to 9.", "What is 2 + 3?", "Repeat: apple banana cherry")


def mixed_requests(count: int, seed: int, *, patient: bool = False) -> list[Request]:
    """Texts, one and two pictures (few enough that most are asked about again), streams, impatient clients.

    With ``patient`` all are streams of clients that stay, long enough that a fault meets many in their middle.
    """
    rng = random.Random(seed)
    return [_mixed_request(rng, patient) for _ in range(count)]


def _mixed_request(rng: random.Random, patient: bool) -> Request:
    pictures = [rng.randrange(_NUM_PICTURES) for _ in range(rng.choice((0, 0, 1, 1, 1, 2)))]
    text = rng.choice(_QUESTIONS if pictures else _TEXTS) + " apple" * rng.choice((0, 0, 20, 120))
    max_tokens = rng.choice((48, 120, 250) if patient else (1, 16, 96, 250))
    stream = patient or rng.random() < 0.5
    impatient = not patient and rng.random() < 0.15
    return Request(
        key=f"{pictures} {max_tokens} {text}",
        content=asked(*map(noise, pictures), text=text) if pictures else text,
        fields={"max_tokens": max_tokens, "stream": stream, "ignore_eos": True, "skip_special_tokens": False},
        patience_s=rng.uniform(0, 1.5) if impatient else None,
    )


def report_of(traffic: Traffic) -> dict[str, Any]:
    counts = traffic.outcomes()
    errors = Counter(result.detail for _, result in traffic.results if result.outcome is Outcome.ERROR)
    return {
        "requests": len(traffic.results),
        "distinct": len(traffic.expected),
        "outcomes": {outcome.value: counts[outcome] for outcome in Outcome},
        "clear_errors": dict(sorted(errors.items())),
        "wrong": traffic.wrong(),
    }
