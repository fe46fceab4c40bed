"""Whether cores go in equal parts to threads or to instances."""

import pytest

from epd_serve.profiling.overheads import cores_go_by, told_by


@pytest.mark.parametrize("cores", [1, 2, 4, 64])
def test_a_thread_has_its_part_of_the_threads_or_of_the_instances(cores: int) -> None:
    many = 3 * cores
    assert told_by(1 / many, many, cores) == "thread"
    others = max(cores - 1, 1)  # a thread cannot have more than one core
    assert told_by(1 / others, many, cores) == "instance"


def test_this_machine_has_one_of_both() -> None:
    assert cores_go_by() in ("thread", "instance")
