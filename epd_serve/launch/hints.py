"""Commands to type when a deployment is ready."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

logger = logging.getLogger(__name__)

_PLACEHOLDER = "PICTURE"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions in the commands: one in words, and one about the PNG file ``picture``."""

    text: str = "How many legs do two spiders have?"
    about_picture: str = "What is in the picture?"
    picture: str = "picture.png"


def demo_questions(picture: Path) -> Questions:
    """Questions that the built-in model can answer, about a picture that is drawn to ``picture`` if it can be."""
    image = Image.new("RGB", (320, 240), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((40, 60, 140, 160), fill="red")
    draw.rectangle((190, 80, 280, 170), fill="blue")
    text = "What is the capital of France?"
    try:
        image.save(picture)
    except OSError as error:  # a disk that is full
        logger.warning("%s cannot be written (%s): take a picture of your own", picture, error.strerror or error)
        return Questions(text=text)
    return Questions(text=text, about_picture="What color is the circle?", picture=str(picture))


def next_steps(base_url: str, model: str, questions: Questions, *, images: bool, needs_key: bool) -> str:
    """Commands to paste: a question in words, one about a picture, and a client in Python.

    Args:
        base_url: of the gateway, without ``/v1``.
        images: whether the topology can encode.
        needs_key: whether clients must send the API key; the commands then take it from ``$API_KEY``.
    """
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    curl = f"curl -s {base_url}/v1/chat/completions -H 'Content-Type: application/json'{key}"
    steps = ["Ask in words:", f"{curl} -d {_quoted(_body(model, questions.text))}"]
    if images:
        content = [
            {"type": "text", "text": questions.about_picture},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PLACEHOLDER}"}},
        ]
        before, after = _quoted(_body(model, content)).split(_PLACEHOLDER)
        picture = f"""'"$(base64 -w0 {questions.picture})"'"""
        # echo and a pipe, since a picture can be longer than an argument of a program may be
        steps += ["Ask about a picture:", f"echo {before}{picture}{after} | {curl} -d @-"]
    api_key = "os.environ['API_KEY']" if needs_key else "'-'"
    steps += ["From Python:", f"client = openai.OpenAI(base_url='{base_url}/v1', api_key={api_key})"]
    return "\n".join(step if step.endswith(":") else f"  {step}\n" for step in steps).rstrip()


def _body(model: str, content: object) -> str:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """``text`` as one word of a POSIX shell."""
    return "'" + text.replace("'", "'\"'\"'") + "'"
