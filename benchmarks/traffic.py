"""Mixed requests of users, an open loop of them, and its report."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

from epd_serve.verify.items import asked, clip, noise, sound
from epd_serve.verify.traffic import Outcome, Request, Result, Traffic

#: Seconds from the start, at which a request was sent.
Timed = tuple[float, Request, Result]

_NUM_MEDIA = 24
_COLORS = ("red", "green", "blue", "yellow", "white", "black")
MEDIA: dict[str, Callable[[int], Any]] = {
    "picture": noise,
    "video": lambda number: clip([_COLORS[number % 6], _COLORS[number // 6]], num_frames=4),
    "sound": lambda number: sound(200.0 + 50 * number),
}
_QUESTIONS = (
    "What color is the circle?",
    "What is in the picture?",
    "How many shapes are there?",
    "Where is the blue square?",
)
_TEXTS = ("What is the capital of France?", "Count to 9.", "What is 2 + 3?", "Repeat: apple banana cherry")


_SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square", "triangle"]}, "count": {"type": "integer"}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}
#: Fields of requests that are no plain chats.
_SPECIAL: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "seen", "schema": _SCHEMA}}},
    {
        "tools": [{"type": "function", "function": {"name": "count_shapes", "parameters": _SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "count_shapes"}},
    },
    {"n": 3},
)


def mixed_requests(
    count: int, seed: int, *, patient: bool = False, plain: bool = False, media: Sequence[str] = ("picture",)
) -> list[Request]:
    """Texts, one and two media items (few enough that most are asked about again), schemas, tools, several
    choices, streams, impatient clients.

    With ``patient`` all are streams of one plain choice, of clients that stay, long enough that a fault meets many
    in their middle. With ``plain`` none has a schema, tools or several choices.
    """
    rng = random.Random(seed)
    return [_mixed_request(rng, patient, plain, media) for _ in range(count)]


def _mixed_request(rng: random.Random, patient: bool, plain: bool, media: Sequence[str]) -> Request:
    names, parts = [], []
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2))):
        kind, number = rng.choice(media), rng.randrange(_NUM_MEDIA)
        names.append(f"{kind} {number}")
        parts.append(MEDIA[kind](number))
    text = rng.choice(_QUESTIONS if parts else _TEXTS) + " apple" * rng.choice((0, 0, 20, 120))
    max_tokens = rng.choice((48, 120, 250) if patient else (1, 16, 96, 250))
    stream = patient or rng.random() < 0.5
    impatient = not patient and rng.random() < 0.15
    special = rng.choice(_SPECIAL) if not (patient or plain) and rng.random() < 0.2 else None
    ends = {"ignore_eos": True, "skip_special_tokens": False} if special is None or "n" in special else {}
    return Request(
        key=f"{names} {max_tokens} {text} {special}",
        content=asked(*parts, text=text) if parts else text,
        fields={"max_tokens": max_tokens, "stream": stream, **ends, **(special or {})},
        patience_s=rng.uniform(0, 1.5) if impatient else None,
    )


async def ask_at_times(traffic: Traffic, requests: Sequence[Request], arrivals_s: Iterable[float]) -> list[Timed]:
    """Send a request at each time from now, whether those before are answered or not; the requests repeat.

    Returns the results in the order of the answers; the traffic has them, too.
    """
    begun, found = time.monotonic(), list[Timed]()

    async def ask(at_s: float, request: Request) -> None:
        result = await traffic.ask(request)
        traffic.results.append((request, result))
        found.append((at_s, request, result))

    async with asyncio.TaskGroup() as group:
        for at_s, request in zip(arrivals_s, cycle(requests)):
            await asyncio.sleep(begun + at_s - time.monotonic())
            group.create_task(ask(at_s, request))
    return found


def report_of(traffic: Traffic) -> dict[str, Any]:
    counts = traffic.outcomes()
    errors = Counter(one.detail for _, one in traffic.results if one.outcome is Outcome.ERROR)
    return {
        "requests": len(traffic.results),
        "distinct": len(traffic.expected),
        "outcomes": {outcome.value: counts[outcome] for outcome in Outcome},
        "clear_errors": dict(sorted(errors.items())),
        "wrong": traffic.wrong(),
    }
