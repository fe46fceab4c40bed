"""``epd-serve chat`` against a scripted server, and where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-P", "-m", "epd_serve.cli", "chat"]


class Server(ThreadingHTTPServer):
    bodies: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        number = len(self.server.bodies)
        if body["messages"][-1]["content"] == "fail":
            return self.send(400, json.dumps({"error": {"message": "max_tokens is too large"}}).encode())
        chunks = [{"choices": [{"delta": {"content": text}}]} for text in ("answer ", f"{number}\x1b[2J")]
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return self.send(200, "".join([*events, "data: [DONE]\n\n"]).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.bodies = []
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made, f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


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
    assert "/nowhere.png" in nowhere and "max_tokens is too large" in refused
    first, second, third, fourth = (body["messages"] for body in made.bodies)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    assert first == [{"role": "user", "content": [picture, {"type": "text", "text": "hello"}]}]
    assert [one["role"] for one in second] == ["user", "assistant", "user"]
    assert second[2]["content"][0] == picture
    assert len(third) == 5 and fourth == [{"role": "user", "content": "anew"}]
    assert {body["model"] for body in made.bodies} == {"tiny"}


def test_the_exit_code_tells_of_an_error(server: tuple[Server, str]) -> None:
    assert chat("--url", server[1], typed="/help\nhello\n")[0] == 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000"])
def test_a_server_that_is_not_there(url: str) -> None:
    code, _, err = chat("--base-url", url)
    assert code == 2 and url in err
