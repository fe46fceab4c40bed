"""``epd-serve devices``: the devices of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def devices(
    check: Annotated[
        bool, typer.Option("--check", help="Test each device; exit with code 1 on a failure.")
    ] = False,
    vllm: Annotated[
        Path | None, typer.Option(help="With --check: Python of engine: vllm; default: this one.")
    ] = None,
) -> None:
    """List the devices of this machine with their capabilities, or the reason if one is missing."""
    from epd_serve.devices import check_devices, show_devices

    console = Console()
    reports = show_devices(console)
    if check:
        from epd_serve.launch.vllm.installed import show_vllm

        passed = [check_devices(console, reports), show_vllm(console, vllm)]
        if not all(passed):
            raise typer.Exit(1)
