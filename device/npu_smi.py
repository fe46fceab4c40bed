"""Parse ``npu-smi info``: name and health of each NPU.

Unverified on an NPU, and the table is unspecified. The tests use outputs of npu-smi 24.1 published by users of
Atlas A2, Atlas A3 and 310P.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from device.ascend_environment import parse_visible_devices

COMMAND = ("npu-smi", "info")
_TIMEOUT_S = 10.0
_BUS = re.compile(r"NA|[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")


def parse(text: str) -> list[tuple[str, str]]:
    """Return the name and health (OK, Warning, Alarm, Critical or UNKNOWN) of each chip of the table.

    Its order is assumed to be ``npu:0``, ``npu:1``, ...
    """
    chips: list[tuple[str, str]] = []
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
            chips.append((first[0].split()[-1], first[1]))
            first = []
    return chips


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
    name, health = chips[number]
    assert health == "OK", f"npu-smi says {health} of chip {number}, {name}"
    return f"npu-smi says OK of chip {number}, {name}"
