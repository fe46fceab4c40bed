"""The check of vLLM as an engine, for ``epd-serve devices --check``."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from epd_serve.launch.vllm_probe import VllmFound, check_found, probe_vllm


def check_vllm_engine(console: Console, python: Path | None) -> bool:
    """Print a table of what an interpreter's vLLM can run.

    Returns False where an interpreter is named and has no vLLM that can run.
    """
    named = python or Path(sys.executable)
    table = Table("engine: vllm", "can it run", "detail")
    try:
        found = probe_vllm(named)
        check_found(found, python=named)
    except ValueError as error:
        table.add_row(str(named), Text("no", "bold red" if python else "dim"), Text(str(error)))
        console.print(table)
        return python is None
    name = f"vLLM {found.vllm}" + (f", vllm-ascend {found.vllm_ascend}" if found.vllm_ascend else "")
    table.add_row(str(named), Text("yes", "green"), f"{name}, Python {found.python}")
    for connector, missing in connectors_of(found).items():
        table.add_row(connector, Text("no", "yellow") if missing else Text("yes", "green"), missing)
    console.print(table)
    return True


def connectors_of(found: VllmFound) -> dict[str, str]:
    """Each connector of the deployment file, and what that vLLM lacks for it; "" for nothing."""
    return {
        "features: store": found.lacks("store"),
        "features: file": "",
        "media: rewritten": found.lacks("rewritten"),
        "kv: grouped": found.lacks("grouped"),
        "kv: mooncake": "" if found.mooncake else "the mooncake package is not installed there",
        "kv: nixl": "" if found.nixl else "the nixl package is not installed there",
    }
