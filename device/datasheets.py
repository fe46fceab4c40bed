"""Data sheets of devices: compute, memory and links, for devices without measurements."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """Dense half-precision compute, memory, and links of one device.

    Attributes:
        flops: operations per second. bytes_per_s: memory bandwidth. link_bytes_per_s: bandwidth to other devices
            of the machine. host_bytes_per_s: bandwidth to host memory.
        compute_share, bandwidth_share: fractions reached by large kernels: HeteroServe's 85 % (section 2) for
            encodes and prefills, its 80 % for decodes.
        launch_s: host overhead of a step.
        price: in dollars; None: unknown.
    """

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    host_bytes_per_s: float = 32e9
    compute_share: float = 0.85
    bandwidth_share: float = 0.8
    launch_s: float = 2e-3
    price: float | None = None


_PCIE_4, _PCIE_5 = 32, 64  # 16 lanes in one direction


def _spec(
    name: str, teraflops: float, gb_per_s: float, gb: float, link: float, host: float, price: float | None = None
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        flops=teraflops * 1e12,
        bytes_per_s=gb_per_s * 1e9,
        memory_bytes=gb * 1e9,
        link_bytes_per_s=link * 1e9,
        host_bytes_per_s=host * 1e9,
        price=price,
    )


#: TFLOP/s, memory GB/s, memory GB, link GB/s, host link GB/s. The two prices and the RTX 4090's 330 TFLOP/s are
#: HeteroServe's (sections 1 and 6.1); all else is from the vendors' data sheets. The 910B3's host link is assumed
#: to be the slower of the two.
DEVICE_SPECS: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        _spec("a100", 312, 2039, 80, 300, _PCIE_4, 16000),
        _spec("h20", 148, 4000, 96, 450, _PCIE_5),
        _spec("h100", 989, 3350, 80, 450, _PCIE_5),
        _spec("h800", 989, 3350, 80, 200, _PCIE_5),
        _spec("h200", 989, 4800, 141, 450, _PCIE_5),
        _spec("rtx-4090", 330, 1008, 24, 25, _PCIE_4, 3000),
        _spec("ascend-910b3", 313, 1600, 64, 28, _PCIE_4),
    )
}


def spec_of(name: str) -> DeviceSpec:
    """Return the data sheet of a device. Raises ValueError with the known names."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in DEVICE_SPECS:
        raise ValueError(f"unknown device {name!r}; known devices: {', '.join(DEVICE_SPECS)}")
    return DEVICE_SPECS[key]


def has_stream_priorities(kind: str) -> bool:
    """Return whether the language model's stream precedes the tower's: not on a CPU, nor on an NPU."""
    return not kind.startswith(("cpu", "npu", "ascend"))


def emulated_kind(name: str) -> str:
    """Return KIND of ``emulated:KIND:0``: the name of a data sheet, or the file of a measured profile."""
    return name.removeprefix("emulated:").rpartition(":")[0]


def is_measured(kind: str) -> bool:
    """Return whether the kind of an emulated device is the file of a measured profile."""
    return kind.endswith(".json")


def emulated_sheet(kind: str) -> DeviceSpec:
    """Return the name, memory and links of an emulated device.

    A measured profile holds its times itself: its compute and bandwidth are NaN here.

    Raises ValueError unless the kind is known or the file of a profile.
    """
    if not is_measured(kind):
        return spec_of(kind)
    path = Path(kind)
    try:
        found = json.loads(path.read_bytes())
        memory_bytes, link_bytes_per_s = float(found["memory_bytes"]), float(found.get("link_bytes_per_s", 4e9))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a profile with device memory ({error!r})"
        raise ValueError(f"{kind}: {reason}; 'epd-serve profile' makes one") from error
    return DeviceSpec(
        name=path.stem,
        flops=math.nan,
        bytes_per_s=math.nan,
        memory_bytes=memory_bytes,
        link_bytes_per_s=link_bytes_per_s,
    )
