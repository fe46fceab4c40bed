"""Parse ``npu-smi info``: health, utilisation and memory of each NPU.

Unverified on an NPU, and the table is unspecified. The tests use outputs of npu-smi 24.1 published by users of
Atlas A2, Atlas A3 and 310P.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from device.ascend_limits import parse_visible_devices

COMMAND = ("npu-smi", "info")
_TIMEOUT_S = 10.0
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_BUS = re.compile(r"NA|[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """Two rows of the table; None for a number that npu-smi omits.

    Attributes:
        health: OK, Warning, Alarm, Critical or UNKNOWN.
        utilisation: AI cores, as a fraction of 1.
    """

    name: str
    health: str
    utilisation: float | None
    memory_used_bytes: int | None
    memory_bytes: int | None


def parse(text: str) -> list[Chip]:
    """Return the chips in table order, assumed to be ``npu:0``, ``npu:1``, ...; empty without a table."""
    chips: list[Chip] = []
    first: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if any(cell.startswith("Process id") for cell in cells):
            break
        if len(cells) != 3 or not cells[0][:1].isdigit():
            continue
        if not _BUS.fullmatch(cells[1]):
            first = cells
        elif first:
            chips.append(_chip(first, cells[2]))
            first = []
    return chips


def _chip(first: list[str], figures: str) -> Chip:
    cores = figures.split()[0]
    # A chip has HBM or other memory; the unused column is 0 / 0.
    used, total = max(
        ((int(a), int(b)) for a, b in _USAGE.findall(figures)), key=lambda pair: pair[1], default=(0, 0)
    )
    return Chip(
        name=first[0].split()[-1],
        health=first[1],
        utilisation=int(cores) / 100 if cores.isdigit() else None,
        memory_used_bytes=used << 20 if total else None,
        memory_bytes=total << 20 if total else None,
    )


def check_health(index: int) -> str:
    """Return npu-smi's verdict on ``npu:index``. Raises AssertionError if it is unhealthy."""
    if shutil.which(COMMAND[0]) is None:
        return "npu-smi is not on PATH: not asked"
    output = subprocess.run(COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    chips = parse(output)
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    number = parse_visible_devices(visible)[index] if visible else index
    if number >= len(chips):
        return f"npu-smi lists {len(chips)} chips, but not number {number}"
    chip = chips[number]
    assert chip.health == "OK", f"npu-smi says {chip.health} of chip {number}, {chip.name}"
    return f"npu-smi says OK of chip {number}, {chip.name}"
