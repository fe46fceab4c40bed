"""``epd-serve devices``: the devices of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def devices(
    check: Annotated[
        bool, typer.Option("--check", help="Test each device; exit code 1 where something is wrong.")
    ] = False,
    vllm: Annotated[
        Path | None, typer.Option(help="With --check: the Python that engine: vllm would use; this one if absent.")
    ] = None,
) -> None:
    """List the devices of this machine, what each can do, and why one is missing."""
    from epd_serve.devices import check_devices, show_devices

    console = Console()
    reports = show_devices(console)
    if check:
        from epd_serve.launch.vllm.installed import show_vllm

        passed = [check_devices(console, reports), show_vllm(console, vllm)]
        if not all(passed):
            raise typer.Exit(1)
