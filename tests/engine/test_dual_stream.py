"""Tower and language model beside each other: pauses, threads, memory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clock import Clock
from pictures import noise
from tiny_models import make_tiny_model

from device.registry import get_device
from epd_serve.engine.device_board import DeviceBoard, Slack
from epd_serve.engine.dual_stream import Cores, LanguageStream, TowerStream
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.sched.schedule import ScheduleOutput

DECODES: Any = ScheduleOutput(decodes=[object()])  # type: ignore[list-item]
PREFILL: Any = ScheduleOutput(prefills=[(object(), 5)])  # type: ignore[list-item]


class Rig:
    """Both sides on one board, and a clock that pauses move on."""

    def __init__(self, limit_s: float | None = 0.1, **tower: Any) -> None:
        self.clock = Clock()
        self.device = get_device("cpu")
        self.board = DeviceBoard(None, 0, self.clock)
        self.language = LanguageStream(self.device, self.board, limit_s=limit_s, clock=self.clock)
        self.tower = TowerStream(
            self.device, self.board, language=self.language, clock=self.clock, sleep=self.clock.sleep, **tower
        )

    def step(self, seconds: float, output: Any = DECODES, num_running: int = 1) -> None:
        with self.language.step():
            self.clock.now += seconds
        self.language.stepped(output, seconds, num_running)

    def encode(self, layers: int, layer_s: float, pixels: int = 1000) -> float:
        """Seconds that a batch takes with its pauses."""
        begun = self.clock.now
        with self.tower.encoding(pixels):
            for _ in range(layers):
                self.tower.between_layers()
                self.clock.now += layer_s
        return self.clock.now - begun


def test_layers_run_without_a_pause_where_nothing_decodes_under_a_limit() -> None:
    rig = Rig()
    assert rig.encode(4, 0.5) == pytest.approx(2.0)
    rig.step(0.3, PREFILL)
    assert rig.encode(4, 0.5) == pytest.approx(2.0)
    without = Rig(limit_s=None)
    without.step(0.3)
    assert without.encode(4, 0.5) == pytest.approx(2.0)


def test_layers_wait_while_decodes_have_no_time_to_spare_and_go_on_when_they_have() -> None:
    rig = Rig()
    rig.step(0.2)  # over its limit of 0.1
    assert rig.board.slack() is not None
    begun = rig.clock.now
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        assert not rig.board.encodes_here, "a pause is none of the encode's time"
        waited.append(seconds)
        rig.step(0.02)

    rig.tower._sleep = sleep
    with rig.tower.encoding(1000):
        rig.clock.now += 0.02
        rig.tower.between_layers()
        assert rig.board.encodes_here
    assert waited == [pytest.approx(0.05)] * 2, (
        "0.1 too much; 0.06 come back with the first step, 0.08 with the next"
    )
    assert rig.clock.now - begun == pytest.approx(0.06)


def test_the_end_of_the_instance_ends_the_pause() -> None:
    """A batch that only gets its least share would otherwise take minutes to stop."""
    rig = Rig()
    rig.step(5.0)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        rig.tower.hurries = True

    rig.tower._sleep = sleep
    with rig.tower.encoding(1000):
        rig.clock.now += 0.5
        for _ in range(3):
            rig.tower.between_layers()
    assert len(waited) == 1


def test_batches_are_as_large_as_memory_and_the_limit_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    assert rig.tower.max_pixels() == 0, "the first batch is one item, to measure"
    assert rig.tower.may_start(1 << 60), "nothing is known yet"
    peaks = iter([3000, 5000])
    monkeypatch.setattr(rig.device, "reset_peak_memory", lambda: next(peaks))
    monkeypatch.setattr(rig.device, "peak_memory", lambda: next(peaks))
    monkeypatch.setattr(rig.device, "headroom", lambda: 10000)
    rig.encode(4, 0.05, pixels=1000)  # 2 bytes a pixel, 50 µs a pixel and layer
    assert rig.tower.max_pixels() == 5000
    with rig.language.step():
        assert rig.tower.may_start(5000)
        assert not rig.tower.may_start(5001)
    rig.language.stepped(PREFILL, 0.1, 0)
    assert rig.tower.may_start(5001), "the language model is idle: nothing would be freed by waiting"
    rig.step(0.05)
    assert rig.tower.max_pixels() == 4000, "a layer of it takes two tokens"


def test_cores_are_divided_among_the_sides_that_compute_in_all_instances(tmp_path: Path) -> None:
    rig, other, alone = (Rig() for _ in range(3))
    for name, one, board in (("p0", rig, "cores"), ("d0", other, "cores"), ("d1", alone, None)):
        one.language._cores = one.tower._cores = Cores(rig.device, 6, board and tmp_path / board, name)
    seen: list[int] = []

    def run() -> None:
        for decoding in (rig, other):
            with decoding.language.step():
                seen.append(torch.get_num_threads())
            decoding.language.stepped(DECODES, 0.1, 1)
        with rig.tower.encoding(1):
            seen.append(torch.get_num_threads())
            other.language.idle()
            rig.language.stepped(DECODES, 0.1, 0)
            rig.tower.between_layers()
            seen.append(torch.get_num_threads())
            with alone.language.step():
                seen.append(torch.get_num_threads())
        with pytest.raises(RuntimeError), other.language.step():
            raise RuntimeError("out of memory")
        with rig.language.step():
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen == [6, 3, 2, 6, 6, 6]


def test_an_instance_that_died_while_it_computed_leaves_its_cores(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from device.registry import get_device;"
    code += "from epd_serve.engine.dual_stream import Cores; "
    code += "Cores(get_device('cpu'), 1, Path(sys.argv[1]), 'p0').begin(0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "cores")], check=True)
    before = torch.get_num_threads()
    Cores(get_device("cpu"), 5, tmp_path / "cores", "d0").begin(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(before)
    assert threads == 5


def test_a_real_tower_pauses_before_each_of_its_layers(tmp_path: Path) -> None:
    path = make_tiny_model("qwen2_5_vl", tmp_path / "model")
    rig = Rig()
    calls: list[Slack | None] = []

    def between_layers() -> None:
        rig.tower.between_layers()
        calls.append(rig.board.slack())

    family = load_family(path)
    with rig.tower.loading():
        tower = Tower(path, torch.float32, rig.device, between_layers)
        plain = Tower(path, torch.float32, rig.device)
    inputs = family.preprocess(np.array(noise(1)))
    with rig.tower.encoding(1):
        features = tower.encode([inputs])
    assert len(calls) == family.config.vision_config.depth
    assert torch.equal(features[0], plain.encode([inputs])[0])
    assert rig.tower.max_pixels() > 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_failed_or_nothing_to_compute_is_not_busy(fails: bool) -> None:
    """Running sequences may wait for an image whose encode waits for the language model to be idle."""
    rig = Rig()
    rig.step(0.2)
    assert rig.language.is_busy
    if fails:
        with pytest.raises(RuntimeError), rig.language.step():
            raise RuntimeError("out of memory")
    else:
        rig.language.idle()
    assert not rig.language.is_busy
    assert rig.board.slack() is None


def test_an_assistants_step_waits_a_second_for_encodes_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    monkeypatch.setattr(time, "sleep", rig.clock.sleep)
    rig.language.tower, rig.language.assists = rig.tower, True
    rig.step(0.2)
    began_s = rig.clock.now
    rig.step(0.2)
    assert rig.clock.now - began_s == pytest.approx(0.2), "nothing is to be encoded"
    rig.tower.is_wanted = True
    with rig.language.step():
        assert 1.0 <= rig.clock.now - began_s - 0.2 <= 1.01
    rig.language.stepped(DECODES, 0.2, 1)

    def encoded(seconds: float) -> None:
        rig.clock.sleep(0.3)
        rig.tower.is_wanted = False
        assert not rig.language.is_busy, "the tower need not wait for the step that waits for it"

    monkeypatch.setattr(time, "sleep", encoded)
    began_s = rig.clock.now
    rig.step(0.1)
    assert rig.clock.now - began_s == pytest.approx(0.4)
