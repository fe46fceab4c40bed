"""The flags that epd-serve writes are those of the vLLM that is installed, and models are judged as it does."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from epd_serve.config.model_files import read_model_config
from epd_serve.launch.vllm.installed import check_model, find_vllm, lacks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LISTED = Path(__file__).parents[1] / "launch" / "test_vllm_processes.py"


def test_vllm_has_every_flag_that_is_written(python: str) -> None:
    assert not lacks(find_vllm(python))["E by itself"]
    command = [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for node in ast.parse(LISTED.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KNOWN_FLAGS":
            flags = {f"--{flag.replace('_', '-')}" for flag in ast.literal_eval(node.value)}
            assert not {flag for flag in flags if flag not in told}
            return
    raise AssertionError("the list of flags is not there")


@pytest.mark.parametrize(
    ("architecture", "encodes", "fault"),
    [
        ("LlamaForCausalLM", False, ""),
        ("LlamaForCausalLM", True, "takes text alone"),
        ("NoSuchModel", False, "does not serve NoSuchModel"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    architecture: str, encodes: bool, fault: str, python: str, tmp_path: Path
) -> None:
    model = make_tiny_model("llama", tmp_path / "tiny")
    content = {**read_model_config(model), "architectures": [architecture]}
    (model / "config.json").write_text(json.dumps(content))
    if not fault:
        check_model(find_vllm(python), content, python=python, model=model, encodes=encodes)
        return
    with pytest.raises(ValueError, match=fault):
        check_model(find_vllm(python), content, python=python, model=model, encodes=encodes)
