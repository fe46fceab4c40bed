"""Devices by name, what is reported of them, and what is said of those that are missing."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch

from device import ascend, cuda
from device.base import Device, DeviceUnavailable
from device.registry import KINDS, get_device, list_devices


@pytest.mark.parametrize(
    "name", ["", "gpu", "cpu:", "cuda:-1", "cuda:x", "cuda:0 ", "npu:0:1", "CUDA:0", "cuda:٣"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown device .*cuda:N") as caught:
        get_device(name)
    assert not isinstance(caught.value, DeviceUnavailable)


def test_every_kind_is_reported_with_what_it_can_do_or_why_it_is_missing() -> None:
    reports = list_devices()
    assert list(dict.fromkeys(report.kind for report in reports)) == list(KINDS)
    for report in reports:
        if report.available:
            assert report.reason is None
            assert report.memory_total_bytes and report.memory_free_bytes is not None
            assert report.attention and report.graphs and report.partition
            assert ("bfloat16" if report.kind == "npu" else "float32") in report.dtypes
            assert get_device(report.name).name == report.name
        else:
            assert report.reason
            with pytest.raises(DeviceUnavailable) as caught:
                get_device(report.kind)
            assert report.reason in str(caught.value)


def test_a_device_that_does_not_open_leaves_the_others_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU that another process holds for itself alone."""
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setattr(cuda, "count", lambda: 1)

    def busy(index: int) -> Device:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(cuda, "open_device", busy)
    reports = {report.name: report for report in list_devices()}
    assert reports["cpu"].available
    assert not reports["cuda:0"].available
    assert "busy" in (reports["cuda:0"].reason or "")


def test_a_torch_npu_that_does_not_load_says_why(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    reason = ascend.missing()
    assert reason is not None
    assert "libascendcl.so" in reason
    assert "set_env.sh" in reason


def test_a_missing_driver_and_hidden_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda.Path, "exists", lambda path: False)
    assert cuda.missing() == "no NVIDIA driver is loaded"
    monkeypatch.setattr(cuda.Path, "exists", lambda path: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda.missing() == "no GPU is visible (CUDA_VISIBLE_DEVICES='')"


def test_without_torch_every_kind_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without_torch(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_torch)
    for report in list_devices():
        assert not report.available
        assert report.reason == "torch is not installed; run in epd-serve's clone: pip install '.[native]'"
    with pytest.raises(DeviceUnavailable, match="torch is not installed"):
        get_device("cpu")
