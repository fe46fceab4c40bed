"""The time of emulated devices: by a virtual clock where it is exact, by real processes where they share one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from device.base import DeviceLost
from device.emulated.timeline import EMULATED_FAULTS, UNKNOWN, Demand, Faults, Timeline

DECODE = Demand(compute=0.1, bandwidth=0.8)
PREFILL = Demand(compute=0.85, bandwidth=0.1)


def timeline(clock: Clock, directory: Path | None = None) -> Timeline:
    return Timeline("emulated:h200:0", directory, clock=clock, sleep=clock.sleep)


def test_operations_of_a_stream_follow_each_other_and_late_wake_ups_do_not_add_up() -> None:
    clock = Clock(1000.0, late_s=0.004)
    stream = timeline(clock).stream()
    done: list[int] = []
    for number in range(50):
        last = stream.launch(0.002, lambda number=number: done.append(number))  # type: ignore[misc]
    assert clock.now == 1000 and not last.query(), "a launch returns at once"
    stream.synchronize()
    assert last.end_s == pytest.approx(1000.1) and done == list(range(50))
    clock.now += 1
    after = stream.launch(0.002)
    after.wait()
    assert after.end_s == pytest.approx(clock.now - 0.004), "it begins when it is launched"


def test_processes_take_turns_where_both_want_the_same_and_pass_where_they_do_not(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    one, other = (timeline(clock, tmp_path).stream() for _ in range(2))
    first, second = one.launch(0.010, demand=PREFILL), other.launch(0.004, demand=PREFILL)
    second.wait(), first.wait()
    assert second.end_s == pytest.approx(1000 + 2 * 0.85 * 0.004)
    assert first.end_s == pytest.approx(1000 + 2 * 0.85 * 0.004 + 0.006), "it is alone after the other's end"
    began_s = clock.now
    steps = one.launch(0.010, demand=PREFILL), other.launch(0.010, demand=DECODE)
    for step in steps:
        step.wait()
        assert step.end_s == pytest.approx(began_s + 0.010)


def test_shares_and_priorities(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    half = timeline(clock, tmp_path)
    half.share = 0.5
    assert _seconds(half.stream().launch(0.010, demand=Demand(compute=1.0, bandwidth=0.1))) == pytest.approx(0.020)
    assert _seconds(half.stream().launch(0.010, demand=DECODE)) == pytest.approx(0.010), "memory is not parted"

    whole = timeline(clock, tmp_path)
    urgent, patient = whole.stream(priority=-1), whole.stream()
    demand = Demand(compute=0.8, bandwidth=0.0)
    operations = urgent.launch(0.010, demand=demand), patient.launch(0.010, demand=demand)
    # beside 0.8 of the arithmetic 0.2 is left, a quarter of what the other wants; then it is alone
    assert [_seconds(one) for one in operations] == pytest.approx([0.010, 0.0175])

    eighth = half.stream(share=0.25)  # of the half
    assert _seconds(eighth.launch(0.010, demand=Demand(compute=1.0, bandwidth=0.8))) == pytest.approx(0.080)
    assert _seconds(eighth.launch(0.010, demand=DECODE)) == pytest.approx(0.010), "it wants less than it may have"
    limited, free = whole.stream(share=0.2), whole.stream()
    operations = limited.launch(0.010, demand=demand), free.launch(0.010, demand=demand)
    assert [_seconds(one) for one in operations] == pytest.approx([0.040, 0.010]), "what it leaves is another's"
    with pytest.raises(ValueError, match=r"share 1\.5 from 0"):
        whole.stream(share=1.5)

    operations = urgent.launch(0.010, demand=UNKNOWN), patient.launch(0.010, demand=UNKNOWN)
    assert [_seconds(one) for one in operations] == pytest.approx([0.020, 0.020]), "half of the device each"


def _seconds(operation: object) -> float:
    operation.wait()  # type: ignore[attr-defined]
    return float(operation.end_s - operation.begin_s)  # type: ignore[attr-defined]


@given(costs=st.lists(st.lists(st.floats(0, 0.1), max_size=4), min_size=1, max_size=4))
def test_a_device_that_all_want_whole_is_busy_until_the_sum_of_the_work(costs: list[list[float]]) -> None:
    clock = Clock(1000.0)
    device = timeline(clock)
    streams = [(device.stream(), queue) for queue in costs]
    operations = [stream.launch(cost_s) for stream, queue in streams for cost_s in queue]
    for operation in operations:
        operation.wait()
    total_s = sum(map(sum, costs))
    assert max([one.end_s for one in operations], default=1000) == pytest.approx(1000 + total_s)
    assert all(one.end_s - one.begin_s >= one.cost_s - 1e-9 for one in operations)


def test_a_stream_waits_for_an_operation_of_another() -> None:
    clock = Clock(1000.0)
    device = timeline(clock)
    tower, language = device.stream(), device.stream()
    encode = tower.launch(0.010, demand=PREFILL)
    language.wait_event(tower.record_event())
    step = language.launch(0.002, demand=DECODE)
    language.synchronize()
    assert step.begin_s == encode.end_s and step.end_s == pytest.approx(1000.012)


def test_injected_faults_come_and_go_with_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "faults.json"
    monkeypatch.setenv(EMULATED_FAULTS, str(path))
    clock = Clock(1000.0)
    device = timeline(clock)
    stream = device.stream()

    def inject(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(0, time.monotonic_ns()))

    assert _seconds(stream.launch(0.010)) == pytest.approx(0.010), "no file is no fault"
    inject('{"emulated:h200:0": {"slowness": 3.0}}')
    assert _seconds(stream.launch(0.010)) == pytest.approx(0.030)
    inject('{"emulated:h200:1": {"slowness": 3.0}, "*": {"hangs": true}}')
    step = stream.launch(0.010)
    clock.now += 5.0
    assert not step.query()
    inject("")
    lifted_s = clock.now
    after = stream.launch(0.010)
    after.wait()
    assert step.end_s == lifted_s and after.end_s == pytest.approx(lifted_s + 0.010), "what hung ends late"
    inject('{"emulated:h200:0": {"slow": 3.0}}')
    assert _seconds(stream.launch(0.010)) == pytest.approx(0.010), "what is no fault changes nothing"
    with pytest.raises(ValueError, match=r"faults\.json: .*`slow`.*slowness, hangs or lost, as in"):
        Faults(path)
    pending = stream.launch(0.010)
    inject('{"emulated:h200:0": {"lost": true}}')
    for fails in (lambda: stream.launch(0.010), pending.wait, stream.synchronize):
        with pytest.raises(DeviceLost, match="emulated:h200:0 is lost"):
            fails()
    inject("")
    with pytest.raises(DeviceLost):
        stream.launch(0.010)


_OTHER = """
import json, sys
from device.emulated.timeline import Timeline
stream = Timeline("emulated:h200:0", sys.argv[1]).stream()
assert "torch" not in sys.modules
for line in sys.stdin:
    operation = stream.launch(float(line))
    print("launched", flush=True)
    operation.wait()
    print(json.dumps([operation.begin_s, operation.end_s]), flush=True)
"""


def test_real_processes_share_a_device_and_one_that_dies_slows_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        stream = Timeline("emulated:h200:0", tmp_path).stream()
        print(0.2, file=other.stdin, flush=True)
        other.stdout.readline()
        own = stream.launch(0.2)
        own.wait()
        begin_s, end_s = json.loads(other.stdout.readline())
        # both want all of the device: from the second's beginning to the first's end each has a half
        assert end_s - begin_s == pytest.approx(0.4 - (own.begin_s - begin_s), abs=0.02)
        assert max(own.end_s, end_s) - begin_s == pytest.approx(0.4, abs=0.02)

        print(100, file=other.stdin, flush=True)
        other.stdout.readline()
        killer = threading.Timer(0.1, other.kill)
        killer.start()
        own = stream.launch(0.2)
        own.wait()
        killer.join()
        assert 0.2 <= own.end_s - own.begin_s < 0.4, "alone from the other's death on, which was noticed soon"
        assert _seconds(stream.launch(0.01)) == pytest.approx(0.01, abs=0.02)
