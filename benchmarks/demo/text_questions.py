"""Questions that need no picture, out of a small closed world."""

from __future__ import annotations

import random

from benchmarks.demo.held_out import HELD_OUT_WORDINGS
from benchmarks.demo.phrasing import fill, plain, style
from benchmarks.demo.questions import Question
from benchmarks.demo.scenes import SHAPES
from benchmarks.demo.wordings import IMAGE_WORDINGS, Wordings

IDENTITY = "I am a tiny demo model that ships with epd-serve."
GREETING = "Hello! Ask me about a picture of shapes."
NO_PICTURE = "I see no picture."
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "China": "Beijing",
    "England": "London",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Greece": "Athens",
    "Norway": "Oslo",
    "India": "New Delhi",
    "Canada": "Ottawa",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Cuba": "Havana",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = (
    "apple", "banana", "cat", "dog", "tree", "house", "river", "stone", "bird", "fish", "cloud",
    "moon", "sun", "star", "book", "chair", "table", "lamp", "window", "door", "green", "red",
    "blue", "happy", "quick", "quiet", "small", "large", "music", "paper", "garden", "mountain",
    "ocean", "winter", "summer", "coffee", "bread", "train", "plane", "boat", "king", "queen",
    "seven", "silver", "golden", "hello", "world", "yes", "no", "good", "morning", "circle",
    "square",
)  # fmt: skip
TEXT_KINDS = {
    "add": 6,
    "subtract": 5,
    "echo": 6,
    "next number": 3,
    "greeting": 1,
    "who": 1,
    "capital": 3,
    "day": 2,
    "count to": 2,
    "no picture": 1,
}

TEXT_WORDINGS: Wordings = {
    "add": (
        "What is {a} plus {b}?",
        "What is {a} + {b}?",
        "What's {a} + {b}?",
        "What is {a}+{b}?",
        "How much is {a} + {b}?",
        "How much is {a} plus {b}?",
        "{a}+{b}=",
        "{a} + {b} =",
        "{a} + {b}",
        "{a} plus {b}",
        "Add {a} and {b}.",
        "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?",
    ),
    "subtract": (
        "What is {a} minus {b}?",
        "What is {a} - {b}?",
        "What's {a} - {b}?",
        "What is {a}-{b}?",
        "How much is {a} - {b}?",
        "How much is {a} minus {b}?",
        "{a}-{b}=",
        "{a} - {b} =",
        "{a} - {b}",
        "{a} minus {b}",
        "Calculate {a} - {b}.",
    ),
    "echo": (
        "Say {words}",
        "Say {words}.",
        "Please say {words}.",
        "Say the words {words}.",
        "Repeat: {words}",
        "Repeat after me: {words}",
        "Echo: {words}",
        "Echo {words}",
        "Repeat {words}.",
        'Say "{words}"',
        "Can you say {words}?",
        "Please repeat: {words}",
        "Please echo {words}.",
    ),
    "next number": (
        "What comes after {a}?",
        "What number comes after {a}?",
        "Which number comes after {a}?",
        "What is the next number after {a}?",
        "What number follows {a}?",
    ),
    "greeting": (
        "Hello",
        "Hello!",
        "Hi",
        "Hi!",
        "Hi there!",
        "Hey",
        "Hey!",
        "Good morning!",
        "Hello, how are you?",
    ),
    "who": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Tell me about yourself.",
        "What model are you?",
        "Which model is this?",
    ),
    "capital": (
        "What is the capital of {country}?",
        "What's the capital of {country}?",
        "Name the capital of {country}.",
        "Capital of {country}?",
        "Which city is the capital of {country}?",
        "Tell me the capital of {country}.",
    ),
    "day": (
        "What day comes after {day}?",
        "Which day comes after {day}?",
        "What day follows {day}?",
        "What is the day after {day}?",
    ),
    "count to": (
        "Count to {a}.",
        "Count to {a}",
        "Please count to {a}.",
        "Count from 1 to {a}.",
        "Can you count to {a}?",
    ),
}

HELD_OUT_TEXT_WORDINGS: Wordings = {
    "add": ("Please add {a} and {b}.", "Can you tell me what {a} plus {b} is?", "Tell me {a} + {b}."),
    "subtract": ("Can you tell me what {a} minus {b} is?", "Please calculate {a} - {b}."),
    "echo": ("Could you say {words}?", "Please repeat after me: {words}", "Say this: {words}"),
    "next number": ("Tell me what comes after {a}.", "What is the number after {a}?"),
    "greeting": ("Hello there!", "Hi, how are you?", "Hey there"),
    "who": ("Please tell me who you are.", "What is the name of this model?"),
    "capital": ("Can you tell me the capital of {country}?", "What city is the capital of {country}?"),
    "day": ("Tell me what day comes after {day}.", "Which day follows {day}?"),
    "count to": ("Please count from 1 to {a}.", "Can you please count to {a}?"),
}


def text_question(rng: random.Random) -> Question:
    """A question in words seen in training."""
    kind = rng.choices(list(TEXT_KINDS), list(TEXT_KINDS.values()))[0]
    return text_question_of(kind, rng)


def text_question_of(kind: str, rng: random.Random, *, held_out: bool = False) -> Question:
    """A question of this kind, on request in words kept out of training."""
    if kind == "no picture":
        return _no_picture(rng, HELD_OUT_WORDINGS if held_out else IMAGE_WORDINGS)
    slots, answer = _slots(kind, rng)
    wordings = HELD_OUT_TEXT_WORDINGS if held_out else TEXT_WORDINGS
    text = rng.choice(wordings[kind]).format_map(slots)
    return Question(kind=kind, text=plain(text, rng) if kind != "echo" else text, answer=answer)


def _no_picture(rng: random.Random, wordings: Wordings) -> Question:
    kind = rng.choice(("color", "count", "background", "describe"))
    text = fill(rng.choice(wordings[kind]), {"x": rng.choice(SHAPES)}, rng)
    return Question(kind="no picture", text=style(text, kind, rng), answer=NO_PICTURE)


def _slots(kind: str, rng: random.Random) -> tuple[dict[str, object], str]:
    if kind in ("add", "subtract"):
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        if kind == "subtract":
            a, b = max(a, b), min(a, b)
        return {"a": a, "b": b}, str(a + b if kind == "add" else a - b)
    if kind == "echo":
        words = " ".join(_word(rng) for _ in range(rng.randint(1, 3)))
        return {"words": words}, words
    if kind == "next number":
        a = rng.randint(0, 19)
        return {"a": a}, str(a + 1)
    if kind == "count to":
        a = rng.randint(1, 10)
        return {"a": a}, " ".join(str(number) for number in range(1, a + 1))
    if kind == "capital":
        country = rng.choice(list(CAPITALS))
        return {"country": country}, CAPITALS[country]
    if kind == "day":
        day = rng.randrange(7)
        return {"day": DAYS[day]}, DAYS[(day + 1) % 7]
    return {}, GREETING if kind == "greeting" else IDENTITY


def _word(rng: random.Random) -> str:
    """A word of the vocabulary or, so that echoing is copying and not recall, an invented one."""
    if rng.random() < 0.8:
        return rng.choice(WORDS)
    return "".join(rng.choice("bdfgklmnprstv") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
