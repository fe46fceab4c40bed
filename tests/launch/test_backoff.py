from hypothesis import given
from hypothesis import strategies as st

from epd_serve.launch.processes.supervisor import Backoff


def test_waits_double_up_to_a_limit() -> None:
    backoff = Backoff()
    assert [backoff.next_delay_s(0.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_a_good_while_is_a_new_beginning() -> None:
    backoff = Backoff(well_after_s=60)
    assert [backoff.next_delay_s(ready_s) for ready_s in (5.0, 59.0, 60.0, 1.0)] == [1, 2, 1, 2]


@given(ready_s=st.lists(st.floats(0, 100), max_size=3000))
def test_a_wait_is_never_longer_than_the_limit_however_often_it_dies(ready_s: list[float]) -> None:
    backoff = Backoff(first_s=0.5, limit_s=9, well_after_s=50)
    assert all(0.5 <= backoff.next_delay_s(one) <= 9 for one in ready_s)
