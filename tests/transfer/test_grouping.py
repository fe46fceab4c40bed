"""The smallest hidden group is the smallest, and it is hidden."""

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.transfer.grouping import GroupSizer, smallest_hidden_group


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
    assert hidden(group) or group == num_layers
    assert not any(
        hidden(g) for g in range(1, group) if abs(handshake_s - g * (layer_s - layer_bytes / bytes_per_s)) > 1e-9
    )


def test_measured_times_move_the_size() -> None:
    sizer = GroupSizer(num_layers=32)
    assert sizer.group_size() == 32, "nothing is known yet"
    sizer.observe_compute(step_s=0.32, step_bytes=32e6)
    sizer.observe_transfer(nbytes=4_000_000, seconds=0.004, handshake_s=0.03)
    assert sizer.group_size() == 4  # 0.03 + g·1 ms <= g·10 ms
    assert GroupSizer(num_layers=4, fixed=8).group_size() == 4
