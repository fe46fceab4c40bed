import asyncio
import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epd_serve.config import DeploymentConfig, parse_config
from epd_serve.launch.up import Questions, _notes, drawn, next_steps


def commands(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


def test_the_printed_commands_send_what_they_show(tmp_path: Path) -> None:
    """Run in a shell in which curl prints its last argument, or what it reads."""
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nfor last; do :; done\ntest "$last" = @- && exec cat\nprintf %s "$last"\n')
    curl.chmod(0o755)
    questions = Questions(picture=drawn(tmp_path / "picture.png"))
    text, image, chat = commands(next_steps("http://h:1", "demo", questions, needs_key=False))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def body(command: str) -> dict[str, object]:
        done = subprocess.run(["sh", "-c", command], capture_output=True, check=True, env=environment, timeout=150)
        return json.loads(done.stdout)

    assert body(text) == {"model": "demo", "messages": [{"role": "user", "content": questions.text}]}
    ((message,),) = [body(image)["messages"]]
    ask, picture = message["content"]
    assert ask == {"type": "text", "text": questions.about_picture}
    prefix, encoded = picture["image_url"]["url"].split(",")
    assert prefix == "data:image/png;base64"
    assert base64.b64decode(encoded) == (tmp_path / "picture.png").read_bytes()
    assert chat == f"epd-serve chat --base-url http://h:1 --image {tmp_path}/picture.png"


def test_a_full_disk_costs_the_picture_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture = tmp_path / "picture.png"
    picture.symlink_to("/dev/full")
    assert drawn(picture) is None
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_key_is_taken_from_the_environment(needs_key: bool) -> None:
    text = next_steps("http://h:1", "it's", Questions(picture="p.png"), needs_key=needs_key)
    assert ("$API_KEY" in text) == needs_key
    assert ("os.environ['API_KEY']" in text) == needs_key


def test_without_a_picture_there_is_no_image_command() -> None:
    text = next_steps("http://h:1", "m", Questions(), needs_key=False)
    assert "image" not in text and "base64" not in text


@pytest.mark.parametrize("needs_key", [True, False])
@pytest.mark.parametrize("with_picture", [True, False])
async def test_the_python_program_is_whole(needs_key: bool, with_picture: bool, tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append({**await request.json(), "key": request.headers["authorization"]})
        message = {"role": "assistant", "content": "It is red."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    questions = Questions(picture=drawn(tmp_path / "picture.png") if with_picture else None)
    async with TestServer(app) as server:
        url = str(server.make_url("/")).rstrip("/")
        program = next_steps(url, "it's", questions, needs_key=needs_key).partition("openai):")[2]
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, env={**os.environ, "API_KEY": "sk-1"}, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await run.communicate()
    assert output == b"It is red.\n"
    ((question,),) = [asked]
    assert question["model"] == "it's" and question["key"] == ("Bearer sk-1" if needs_key else "Bearer -")
    assert ("data:image/png;base64,iVBOR" in json.dumps(question)) == with_picture


def test_a_deployment_says_what_of_it_is_made_up() -> None:
    shape = "model: {shape_of: qwen2.5-vl-7b}\ndevices: ['emulated:h200 x 2']\ntopology: EP-D"
    assert any("answers are made of hashes" in note for note in _notes(parse_config(shape)))
    assert not _notes(DeploymentConfig())
