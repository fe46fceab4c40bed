"""Find the accelerators and cores visible to this process in milliseconds, without torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from device.ascend_environment import parse_visible_devices

_NO_CUDA_DEVICE = 100  # cuInit's CUDA_ERROR_NO_DEVICE
#: The directory in which processes on one emulated device share its memory count.
EMULATED_MEMORY = "EPD_SERVE_EMULATED_MEMORY"
_DEVICE_FILES = Path("/dev")
#: The variable that limits the visible devices of each kind.
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_CGROUPS = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Return the number of cores this process may use: its affinity, or its container's limit if lower.

    The limit is a cgroup's: ``cpu.max`` of version 2, ``cpu.cfs_quota_us`` of version 1 (kernel documentation,
    cgroup-v2.rst and sched-bwc.rst), rounded down to at least one core.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUPS / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((_CGROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return cores
    if quota == "max" or int(quota) < 0:
        return cores
    return max(1, min(cores, int(quota) // int(period)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """The accelerators of one kind.

    Attributes:
        memory_bytes: memory of each; None if unknown.
        reason: why none was found; "" if some were.
    """

    memory_bytes: tuple[int | None, ...] = ()
    reason: str = ""


@lru_cache
def accelerators(kind: str) -> Accelerators:
    """Return the accelerators of a kind, ``cuda`` or ``npu``."""
    return _gpus() if kind == "cuda" else _npus()


def torch_lacks(kind: str) -> str:
    """Return what torch lacks for devices of a kind, with the remedy; "" if nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed; run in epd-serve's clone: pip install '.[native]'"
    if kind == "npu" and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; run in epd-serve's clone: pip install '.[ascend]'"
    version = Path(spec.origin).with_name("version.py")
    if kind == "cuda" and version.is_file() and re.search(r"^cuda\b.*= None$", version.read_text(), re.MULTILINE):
        return "the installed torch is built without CUDA; install a CUDA build (pytorch.org)"
    return ""


def visibility(devices: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the variables that show a process these devices alone, and the devices' names in that process.

    Raises ValueError for devices of several kinds and for an invisible device.
    """
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1:
        raise ValueError(f"{', '.join(devices)}: the devices of one instance must be of one kind")
    (kind,) = kinds
    if kind not in _VISIBLE_DEVICES:
        return {}, ",".join(devices)
    variable = _VISIBLE_DEVICES[kind]
    allowed = environment.get(variable)
    shown = [_shown(device, variable, allowed) for device in devices]
    return {variable: ",".join(shown)}, ",".join(f"{kind}:{index}" for index in range(len(devices)))


def _shown(device: str, variable: str, allowed: str | None) -> str:
    """Return the device's name in the variable; this process itself sees only the ``allowed`` devices."""
    index = device.partition(":")[2]
    if allowed is None:
        return index
    if variable == "ASCEND_RT_VISIBLE_DEVICES":
        names = [str(number) for number in parse_visible_devices(allowed)]
    else:
        names = [name.strip() for name in allowed.split(",") if name.strip()]
    if int(index) >= len(names):
        raise ValueError(f"device {device}: {variable}={allowed} shows only {len(names)} devices of this kind")
    return names[int(index)]


def _gpus() -> Accelerators:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Accelerators(reason="no NVIDIA driver is installed (libcuda.so.1)")
    if code := driver.cuInit(0):
        shown = os.environ.get(_VISIBLE_DEVICES["cuda"])
        if code == _NO_CUDA_DEVICE:
            hint = "" if shown is None else f" ({_VISIBLE_DEVICES['cuda']}={shown!r})"
            return Accelerators(reason=f"no GPU is visible{hint}; see nvidia-smi")
        return Accelerators(reason=f"the NVIDIA driver does not start (cuInit: error {code}); see nvidia-smi")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    sizes: list[int | None] = []
    for index in range(count.value):
        device, size = ctypes.c_int(), ctypes.c_size_t()
        found = driver.cuDeviceGet(ctypes.byref(device), index) == 0
        found = found and driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0
        sizes.append(size.value if found else None)
    return Accelerators(memory_bytes=tuple(sizes))


def _npus() -> Accelerators:
    """Count the device files: the driver creates one for each NPU of a container."""
    count = sum(1 for one in _DEVICE_FILES.glob("*davinci*") if re.fullmatch(r"v?davinci[0-9]+", one.name))
    if not count:
        return Accelerators(reason="no NPU found (/dev/davinci0 ...); see npu-smi info")
    if shown := os.environ.get(_VISIBLE_DEVICES["npu"]):
        count = min(count, len(parse_visible_devices(shown)))
    return Accelerators(memory_bytes=(None,) * count)
