"""The smallest hidden group is the smallest, and it is hidden; estimates come to be what is true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.transfer.grouping import (
    GroupSizer,
    TimeEstimate,
    group_ends,
    seconds_until_sent,
    smallest_hidden_group,
)


@given(
    num_layers=st.integers(1, 80),
    layer_s=st.floats(1e-5, 1e-1),
    layer_bytes=st.floats(1, 1e8),
    handshake_s=st.floats(0, 1e-1),
    bytes_per_s=st.floats(1e6, 1e11),
)
def test_against_the_inequality(
    num_layers: int, layer_s: float, layer_bytes: float, handshake_s: float, bytes_per_s: float
) -> None:
    def hidden(group: int) -> bool:
        return handshake_s + group * layer_bytes / bytes_per_s <= group * layer_s * (1 + 1e-9)

    group = smallest_hidden_group(num_layers, layer_s, layer_bytes, handshake_s, bytes_per_s)
    assert 1 <= group <= num_layers
    others = [g for g in range(1, num_layers + 1) if g != group]
    if hidden(group):
        assert not any(
            hidden(g)
            for g in others
            if g < group and abs(handshake_s - g * (layer_s - layer_bytes / bytes_per_s)) > 1e-9
        )
    else:
        assert not any(hidden(g) and handshake_s > 1e-9 for g in others)
        send_s = layer_bytes / bytes_per_s
        taken_s = [seconds_until_sent(num_layers, g, layer_s, send_s, handshake_s) for g in (group, *others)]
        assert taken_s[0] == min(taken_s)


@given(num_layers=st.integers(1, 80), group_size=st.integers(1, 90))
def test_groups_end_at_the_last_layer_and_only_the_first_is_smaller(num_layers: int, group_size: int) -> None:
    ends = sorted(group_ends(num_layers, group_size))
    sizes = [end - before for end, before in zip(ends, [-1, *ends], strict=False)]
    assert ends[-1] == num_layers - 1
    assert 1 <= sizes[0] <= group_size
    assert all(size == group_size for size in sizes[1:])


def test_a_link_that_changes_is_followed() -> None:
    estimate = TimeEstimate()
    for slowness in (1, 5):
        for i in range(100):
            size = 100_000 * (1 + i % 3)
            estimate.observe(size, 0.002 + slowness * size / 1e8)
    assert 1 / estimate.slope_s == pytest.approx(2e7, rel=0.02)
    assert estimate.base_s == pytest.approx(0.002, rel=0.05)


def test_measured_times_move_the_size() -> None:
    sizer = GroupSizer(num_layers=32)
    assert sizer.group_size("d", 100, 1e6) == 8, "nothing is known yet"
    sizer.observe_compute(num_tokens=100, seconds=0.32)
    sizer.observe_transfer("d", 0, 0.03)
    assert sizer.group_size("d", 100, 1e6) == 8, "nor is the bandwidth"
    sizer.observe_transfer("d", 4_000_000, 0.03 + 0.004)
    assert sizer.group_size("d", 100, 1e6) == 4  # 0.03 + g·1 ms <= g·10 ms
    assert sizer.group_size("d", 200, 2e6) == 2  # a step of twice the tokens: 0.03 + g·2 ms <= g·20 ms
    assert sizer.group_size("other", 100, 1e6) == 8
    assert GroupSizer(num_layers=4, fixed=8).group_size("d", 1, 1.0) == 4
    sizer.forget("d")
    assert not sizer.known_links()
