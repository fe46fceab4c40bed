"""``epd-serve devices``: this machine's devices, why others are missing, and self-tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from device import npu_smi
from device.datasheets import DEVICE_SPECS

if TYPE_CHECKING:
    from device.base import Device, DeviceReport

_EMULATED = (
    "no hardware: emulated:h200:0 computes nothing and takes the times of a device by its data sheet, for a model "
    f"{{shape_of: NAME}}\nkinds: {', '.join(DEVICE_SPECS)}, or FILE.json that 'epd-serve profile' wrote"
)


def devices(
    check: Annotated[
        bool, typer.Option("--check", help="Test each device; exit with code 1 on a failure.")
    ] = False,
) -> None:
    """List the devices of this machine with their capabilities, or the reason if one is missing."""
    from device.registry import get_device, list_devices

    console = Console()
    table = Table("device", "state and abilities", show_lines=True)
    reports = list_devices()
    for report in reports:
        if report.available:
            table.add_row(Text(report.name, "bold green"), "\n".join(_abilities(report)))
        else:
            table.add_row(Text(report.name, "dim"), Text(f"not available: {report.reason}", "yellow"))
    table.add_row(Text("emulated", "bold"), _EMULATED)
    console.print(table)
    if check:
        passed = [_check(console, get_device(report.name)) for report in reports if report.available]
        # A missing kind is named without a number; a numbered device is present but does not open.
        if not all(passed) or any(report.name != report.kind for report in reports if not report.available):
            raise typer.Exit(1)


def _check(console: Console, device: Device) -> bool:
    from device.check import check_device

    more = {"health": lambda device: npu_smi.check_health(device.index)} if device.type == "npu" else {}
    table = Table("check", "result", "detail", title=f"{device.name}: {device.description}")
    passed = True
    with console.status(f"checking {device.name}"):
        for result in check_device(device, more):
            word = Text("passed", "green") if result.passed else Text("FAILED", "bold red")
            table.add_row(result.check, word, Text(result.detail))
            passed = passed and result.passed
    console.print(table)
    return passed


def _abilities(report: DeviceReport) -> list[str]:
    cores = f", {report.cores} cores" if report.cores else ""
    lines = [f"{report.description or report.kind}{cores}"]
    if report.memory_total_bytes is not None:
        free, total = _gibibytes(report.memory_free_bytes), _gibibytes(report.memory_total_bytes)
        lines.append(f"memory: {free} of {total} free")
    lines.append(f"dtypes: {', '.join(report.dtypes)}")
    lines.append(f"attention: {report.attention}; graphs: {report.graphs}")
    if report.partition:
        mechanisms = ", ".join(report.partition.mechanisms)
        lines.append(f"sharing by several instances: {report.partition.strength}; {mechanisms}".rstrip("; "))
    lines.append(f"transports: {', '.join(report.transports)}")
    return lines


def _gibibytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 1024**3:.1f} GiB"
