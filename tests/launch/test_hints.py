"""What ``epd-serve up`` says of a deployment."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from epd_serve.config import DeploymentConfig, change_config
from epd_serve.config.keys import hash_key
from epd_serve.launch.up import ready_text


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_printed_command_sends_what_it_shows(needs_key: bool, tmp_path: Path) -> None:
    """Run in a shell in which curl prints its arguments."""
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    curl.chmod(0o755)
    config = change_config(DeploymentConfig(), {"served_model_name": "it's"})
    if needs_key:
        config = change_config(config, {"gateway": {"api_keys": [{"name": "a", "hash": hash_key("secret")}]}})
    text = ready_text(config, "http://h:1", tmp_path, "")
    [command] = [line.removeprefix("Ask: ") for line in text.splitlines() if line.startswith("Ask: ")]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "API_KEY": "sk-1"}
    sent = subprocess.run(
        ["sh", "-c", command], capture_output=True, check=True, text=True, env=environment
    ).stdout
    assert json.loads(sent.splitlines()[-1])["model"] == "it's"
    assert ("Authorization: Bearer sk-1" in sent) == needs_key and "secret" not in text
    assert "epd-serve chat --base-url http://h:1" in text
