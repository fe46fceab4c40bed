"""Bodies of chat requests, and their streamed answers."""

from __future__ import annotations

import base64
import json
from typing import Any

from pictures import png
from PIL import Image


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def chat(text: str, *images: Image.Image | bytes | str, **fields: Any) -> dict[str, Any]:
    """One user message: images (pictures, file bytes or URLs) before the text; greedy unless ``fields`` differ."""
    urls = [
        image if isinstance(image, str) else data_url(image if isinstance(image, bytes) else png(image))
        for image in images
    ]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content: Any = [*parts, {"type": "text", "text": text}] if images else text
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def stream_events(text: str, *, has_end: bool = True) -> list[Any]:
    """The events of a whole stream; ``has_end``: as OpenAI's chats and completions end, with ``[DONE]``."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert not has_end or data.pop() == "[DONE]", text
    return [json.loads(one) for one in data]
