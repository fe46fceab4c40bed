"""Other ways to ask the same things of a picture, kept out of training to measure free wording."""

from __future__ import annotations

from benchmarks.demo.wordings import Wordings

HELD_OUT_WORDINGS: Wordings = {
    "color": (
        "In this {pic}, what {color} is the {x}?",
        "Could you tell me the {color} of the {x}?",
        "What {color} is the {x} that you see?",
        "Please name the {color} of the {x} in the {pic}.",
    ),
    "shape": (
        "Which of the shapes is {c}?",
        "Name the {c} shape.",
        "Tell me which shape is {c}.",
        "In the {pic}, what shape is {c}?",
    ),
    "shape at": (
        "What shape do you see {at}?",
        "Tell me what shape is {at}.",
        "Which shape can you see {at}?",
    ),
    "count": (
        "How many shapes can you see in the {pic}?",
        "Please count the shapes in this {pic}.",
        "Could you tell me how many shapes there are?",
        "How many shapes does this {pic} show?",
    ),
    "count some": (
        "How many {xs} can you see in the {pic}?",
        "Please count the {xs}.",
        "Can you count the {xs} in this {pic}?",
        "How many {xs} does this {pic} show?",
    ),
    "exists": (
        "Do you see {ax} in the {pic}?",
        "Is {ax} shown in the {pic}?",
        "Can you see any {xs} in this {pic}?",
        "Could you tell me if there is {ax}?",
    ),
    "is color": ("Is it true that the {shape} is {c}?", "Would you say the {shape} is {c}?"),
    "background": (
        "What {color} does the background have?",
        "Tell me what {color} the background is.",
        "The {pic} has a background. What {color} is it?",
        "Can you name the {color} of the background?",
    ),
    "where": (
        "Where exactly is the {x}?",
        "Could you tell me where the {x} is?",
        "Where would I find the {x}?",
        "Please tell me where the {x} is in the {pic}.",
    ),
    "what at": (
        "What can you see {at} of this {pic}?",
        "Can you tell me what is {at}?",
        "Please describe what you see {at}.",
        "What object do you see {at}?",
    ),
    "describe": (
        "Can you tell me what is in this {pic}?",
        "Please tell me what you see in this {pic}.",
        "Give me a short description of the {pic}.",
        "What objects are shown in this {pic}?",
        "Tell me everything that you see in the {pic}.",
    ),
    "single shape": ("What shape can you see?", "Tell me the shape.", "What shape does the {pic} show?"),
    "single color": (
        "Tell me the {color} of the shape.",
        "Can you tell me what {color} it is?",
        "The shape is what {color}?",
    ),
}
