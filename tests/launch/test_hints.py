import base64
import json
import os
import subprocess
from pathlib import Path

import pytest

from epd_serve.launch.up import Questions, demo_questions, next_steps


def commands(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


def test_the_printed_commands_send_what_they_show(tmp_path: Path) -> None:
    """Run in a shell in which curl prints its last argument, or what it reads."""
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nfor last; do :; done\ntest "$last" = @- && exec cat\nprintf %s "$last"\n')
    curl.chmod(0o755)
    questions = demo_questions(tmp_path / "picture.png")
    text, image, _ = commands(next_steps("http://h:1", "demo", questions, images=True, needs_key=False))
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


def test_a_full_disk_costs_the_picture_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture = tmp_path / "picture.png"
    picture.symlink_to("/dev/full")
    questions = demo_questions(picture)
    assert questions.picture == "picture.png" and "France" in questions.text
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_key_is_taken_from_the_environment(needs_key: bool) -> None:
    text = next_steps("http://h:1", "it's", Questions(), images=True, needs_key=needs_key)
    assert ("$API_KEY" in text) == needs_key
    assert ("os.environ['API_KEY']" in text) == needs_key


def test_a_text_topology_gets_no_image_command() -> None:
    assert "image_url" not in next_steps("http://h:1", "m", Questions(), images=False, needs_key=False)
