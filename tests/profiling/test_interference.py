"""Pairs side by side on this CPU, in streams and in processes."""

from __future__ import annotations

import importlib.util
import time
from multiprocessing import resource_tracker, spawn
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from device.emulated.accelerator import EmulatedDevice
from device.registry import get_device
from epd_serve.cli.app import app
from epd_serve.cost.interference import InterferenceMatrix
from epd_serve.profiling import interference
from epd_serve.profiling.interference import measure
from epd_serve.profiling.sides import Runner, Setting, Side
from epd_serve.profiling.workloads import WORKLOADS, Factory, Sizes

SMALL = Sizes(
    hidden=64,
    heads=4,
    kv_heads=2,
    intermediate=96,
    layers=2,
    prompt_tokens=12,
    patches=20,
    decodes=3,
    context=40,
    stream_bytes=1 << 14,
)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_computes_something_finite(name: str) -> None:
    with torch.inference_mode():
        result = WORKLOADS[name].build(Factory(get_device("cpu"), torch.float32, SMALL))()
    assert isinstance(result, torch.Tensor) and bool(result.isfinite().all())


def test_a_process_keeps_to_its_share() -> None:
    device = get_device("emulated:h200:7")
    assert isinstance(device, EmulatedDevice)
    try:
        Runner(Setting(device=device.name, dtype="bfloat16", threads=None, share=0.5))
        assert device.timeline.share == 0.5
    finally:
        device.apply_share(1.0)


def test_streams_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Sizes, "for_device", lambda device_type: SMALL)
    few = {name: WORKLOADS[name] for name in ("matmul", "copy", "E", "D")}
    monkeypatch.setattr(interference, "WORKLOADS", few)
    result = CliRunner().invoke(
        app, ["interference", "--isolation", "stream", "--seconds", "0.05", "--out", str(tmp_path / "m")]
    )
    assert result.exit_code == 0, result.output
    assert "operators: pairs of like demand take" in result.output
    matrix = InterferenceMatrix.read(tmp_path / "m.json")
    assert [workload.name for workload in matrix.workloads] == list(few)
    for of, row in zip(matrix.workloads, matrix.increase, strict=True):
        assert [value is not None for value in row] == [of.kind == other.kind for other in matrix.workloads]
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("epd_serve.profiling.interference.measure", lambda *arguments, **options: matrix)
    printed = CliRunner().invoke(app, ["interference", "--json"])
    assert msgspec.json.decode(printed.stdout, type=InterferenceMatrix) == matrix


@pytest.mark.slow
def test_processes() -> None:
    matrix = measure("cpu", isolation="process", dtype="float32", seconds=0.1, threads=1, names=["norm"])
    assert [workload.name for workload in matrix.workloads] == ["norm"]
    assert all(value is not None for row in matrix.increase for value in row)


def test_a_side_that_was_held_up_until_the_end_has_a_time_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "for_device", lambda device_type: SMALL)
    side = Side(Setting(device="cpu", dtype="float32", threads=1), "stream")
    side.prepare("norm").result()
    over = time.monotonic() - 1
    assert len(side.run(over, over).result()) == 1
    side.close()


def test_a_failure_in_a_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    resource_tracker.ensure_running()  # it is started as the process is
    monkeypatch.setattr(spawn, "_python_exe", b"/bin/false")
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        measure("cpu", isolation="process", dtype="float32", seconds=0.1, names=["norm"])


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype int8: cpu computes in float32"):
        measure("cpu", isolation="stream", dtype="int8", seconds=0.1)


def test_without_matplotlib_the_heat_map_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        interference.check_can_draw()


def test_the_table_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "for_device", lambda device_type: SMALL)
    matrix = measure("cpu", isolation="stream", dtype="float32", seconds=0.05, names=["matmul", "copy", "D"])
    console = Console(width=80, record=True)
    interference.show(matrix, console)
    text = console.export_text()
    assert "matmul: compute" in text and "D: bandwidth" in text
    assert max(map(len, text.splitlines())) <= 80
