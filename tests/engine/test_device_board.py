"""Instances on one device know of each other, in one process and across processes."""

from __future__ import annotations

from pathlib import Path

from clock import Clock

from epd_serve.engine.device_board import DeviceBoard, Slack


def test_decodes_tell_what_they_leave_until_they_end_or_fall_silent(tmp_path: Path) -> None:
    clock = Clock()
    encoder, decoder, other = (DeviceBoard(tmp_path / "board", slot, clock) for slot in range(3))
    assert encoder.slack() is None
    slack = Slack(credit_s=0.02, limit_s=0.03, alone_s=0.01, beside_s=0.04)
    decoder.decodes(slack)
    other.decodes(Slack(credit_s=0.5, limit_s=1.0))
    assert encoder.slack() == slack, "the least of all"
    decoder.decodes_end()
    assert encoder.slack() == Slack(credit_s=0.5, limit_s=1.0)
    clock.now += 1.5
    assert encoder.slack() is None, "its process may have died"
    for board in (encoder, decoder, other):
        board.close()


def test_encoding_time_is_counted_while_it_runs(tmp_path: Path) -> None:
    clock = Clock()
    encoder, decoder = (DeviceBoard(tmp_path / "board", slot, clock) for slot in range(2))
    encoder.encode_begins()
    clock.now += 2
    assert (decoder.encoded_s(), encoder.encodes_here, decoder.encodes_here) == (2.0, True, False)
    encoder.encode_ends()
    encoder.encode_ends()
    clock.now += 1
    assert (decoder.encoded_s(), encoder.encodes_here) == (2.0, False)
    again = DeviceBoard(tmp_path / "board", 0, clock)
    assert decoder.encoded_s() == 0.0, "an instance that starts anew wipes what its forerunner left"
    for board in (encoder, decoder, again):
        board.close()
