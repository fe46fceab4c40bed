"""``epd-serve chat`` against a scripted server, and where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import answering

COMMAND = [sys.executable, "-P", "-m", "epd_serve.cli", "chat"]


class Server:
    """Answers each chat with its number; ``bodies`` are the questions."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.models = ["tiny"]

    def answer(self, path: str, data: bytes) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name} for name in self.models]}).encode()
        body = json.loads(data)
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            return 400, json.dumps({"error": {"message": "max_tokens is too large"}}).encode()
        texts = ("answer ", f"{len(self.bodies)}\x1b[2J")
        events = [f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n" for text in texts]
        return 200, "".join([*events, "data: [DONE]\n\n"]).encode()


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    made = Server()
    with answering(made.answer) as url:
        yield made, url


def chat(*arguments: str, typed: str = "") -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(
        [*COMMAND, *arguments], input=typed, capture_output=True, text=True, env=environment, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_conversation(server: tuple[Server, str], tmp_path: Path) -> None:
    made, url = server
    (tmp_path / "a.png").write_bytes(b"png")
    typed = f"hello\n/image {tmp_path}/a.png\nlook\n/image /nowhere.png\nfail\n/clear\nanew\n"
    code, out, _ = chat("--url", f"{url}/v1", "--image", str(tmp_path / "a.png"), typed=typed)
    assert code == 1
    first_line, second_line, nowhere, refused, last = out.splitlines()
    assert (first_line, second_line, last) == ("answer 1[2J", "answer 2[2J", "answer 4[2J")
    assert "/nowhere.png" in nowhere and refused.endswith("answered 400: max_tokens is too large")
    first, second, third, fourth = (body["messages"] for body in made.bodies)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    assert first == [{"role": "user", "content": [picture, {"type": "text", "text": "hello"}]}]
    assert [one["role"] for one in second] == ["user", "assistant", "user"]
    assert second[2]["content"][0] == picture
    assert len(third) == 5 and fourth == [{"role": "user", "content": "anew"}]
    assert {body["model"] for body in made.bodies} == {"tiny"}
    assert chat("--url", url, typed="/help\nhello\n")[0] == 0


def test_one_of_several_models_has_to_be_named(server: tuple[Server, str]) -> None:
    made, url = server
    made.models = ["tiny", "large"]
    code, _, err = chat("--url", url, typed="hello\n")
    assert code == 2 and "--model is missing; the server has tiny, large" in err
    assert chat("--url", url, "--model", "large", typed="hello\n")[0] == 0
    assert [body["model"] for body in made.bodies] == ["large"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000"])
def test_a_server_that_is_not_there(url: str) -> None:
    code, _, err = chat("--base-url", url)
    assert code == 2 and url in err
