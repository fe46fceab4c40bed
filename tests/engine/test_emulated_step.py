"""A step of an emulated model takes the time of the work that was scheduled."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from sequences import sequence

from epd_serve.cost.profile import Line, Profile
from epd_serve.engine.emulated.digests import DigestRunner
from epd_serve.sched.schedule import ScheduleOutput


def test_a_chunk_attends_to_all_tokens_up_to_its_end() -> None:
    profile = Profile(kind="measured", device="any", model="any", step=(Line(pair_s=1.0),), encode=())
    device: Any = Mock()
    memory: Any = Mock(layout=Mock(num_layers=1, block_size=16))
    runner = DigestRunner(memory, device, profile, Mock())
    for computed, count, pairs in ((0, 100, 100 * 100), (40, 60, 60 * 100)):
        runner.launch(ScheduleOutput(prefills=[(sequence(100, computed=computed), count)]), {})
        assert device.current_stream().launch.call_args.args[0] == pairs
