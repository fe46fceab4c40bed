"""The flags that epd-serve writes are those of the vLLM that is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from epd_serve.config import load_config
from epd_serve.launch.vllm.installed import check_found, find_vllm
from epd_serve.launch.vllm.process import vllm_processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
FILES = sorted((Path(__file__).parents[2] / "deploy").glob("vllm-*.yaml"))


def test_vllm_has_every_flag_that_is_written(python: str) -> None:
    found = find_vllm(python)
    check_found(found, python=python, needs=["store"])
    command = [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "--help=all"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for config in map(load_config, FILES):
        engines = {config.vllm.python_of(str(one.role)): found for one in config.placement()}
        ports = range(9000, 9000 + 16 * len(config.placement()), 16)
        for one in vllm_processes(config, config.placement(), ports, {}, found=engines, model="MODEL"):
            flags = {word.replace("--no-", "--") for word in one.spec.command if word.startswith("--")}
            assert flags and not {flag for flag in flags if flag not in told}
