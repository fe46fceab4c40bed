"""Open and list devices by name. A backend, and torch with it, is imported at its first use."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Protocol, cast

from device.base import Device, DeviceReport, DeviceUnavailable

#: The module of each kind of device.
BACKENDS = {"cpu": "device.cpu", "cuda": "device.cuda", "npu": "device.ascend"}
KINDS = tuple(BACKENDS)
#: Network cards with RDMA, as the kernel lists them.
_RDMA_DEVICES = Path("/sys/class/infiniband")
_NAME = re.compile(r"(?P<kind>[a-z]+)(:(?P<index>[0-9]{1,4}))?")


class _Backend(Protocol):
    """The functions that a backend module offers."""

    def missing(self) -> str | None: ...

    def count(self) -> int: ...

    def open_device(self, index: int) -> Device: ...


def get_device(name: str) -> Device:
    """Open ``cpu``, ``cuda``, ``cuda:1`` or ``npu:0``; the index defaults to 0.

    Raises:
        DeviceUnavailable: the device is not present; the message gives the reason.
        ValueError: the name is not a device name.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in BACKENDS:
        raise ValueError(f"unknown device {name!r}: use cpu, cuda, cuda:N, npu or npu:N")
    if (reason := _torch_missing()) is not None:
        raise DeviceUnavailable(f"{name}: {reason}")
    return _backend(match["kind"]).open_device(int(match["index"] or 0))


def list_devices() -> list[DeviceReport]:
    """Return every device, with the reason if it does not open, and one entry for each missing kind."""
    reports: list[DeviceReport] = []
    for kind in KINDS:
        reason = _torch_missing()
        if reason is None:
            backend = _backend(kind)
            reason = backend.missing()
        if reason is None:
            reports += [_report(backend, kind, index) for index in range(backend.count())]
        else:
            reports.append(DeviceReport(name=kind, kind=kind, available=False, reason=reason))
    return reports


def _torch_missing() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; run in epd-serve's clone: pip install '.[native]'"
    return None


def _backend(kind: str) -> _Backend:
    # Imported here because each one imports torch, which the base install leaves out.
    return cast(_Backend, importlib.import_module(BACKENDS[kind]))


def _report(backend: _Backend, kind: str, index: int) -> DeviceReport:
    try:
        device = backend.open_device(index)
        total, free = device.memory()
    except DeviceUnavailable as error:
        return DeviceReport(name=f"{kind}:{index}", kind=kind, available=False, reason=str(error))
    except RuntimeError as error:  # from the driver: memory full, device in an error state or taken
        reason = f"it does not open: {error}"
        return DeviceReport(name=f"{kind}:{index}", kind=kind, available=False, reason=reason)
    has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
    return DeviceReport(
        name=device.name,
        kind=device.type,
        available=True,
        description=device.description,
        memory_total_bytes=total,
        memory_free_bytes=free,
        cores=device.cores,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in device.dtypes),
        attention=device.ops.name,
        graphs=device.graph_runner().name,
        partition=device.partition,
        transports=tuple(one for one in device.transport.mooncake_protocols if one != "rdma" or has_rdma),
    )
