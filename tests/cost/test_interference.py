"""The matrix as data: what it answers, what it refuses, and what it says of like and unlike pairs."""

from pathlib import Path

import msgspec
import pytest

from epd_serve.cost.interference import Demand, InterferenceMatrix, Workload


def matrix(increase: list[list[float | None]], demands: list[Demand] | None = None) -> InterferenceMatrix:
    return InterferenceMatrix(
        device="cpu",
        description="a processor",
        isolation="process",
        dtype="float32",
        threads=1,
        seconds=1.0,
        workloads=[
            Workload(name=f"w{i}", kind="operator", demand=demand, alone_s=0.01, alone_spread=0.0)
            for i, demand in enumerate(demands or ["compute", "bandwidth"])
        ],
        increase=increase,
    )


def test_it_is_the_same_after_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    written = matrix([[0.5, 0.1], [None, -0.02]])
    path.write_bytes(written.to_json())
    read = InterferenceMatrix.read(path)
    assert read == written
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(written), "clock": "wall", "skipped": {}}))
    assert InterferenceMatrix.read(path) == written, "earlier releases wrote these"
    assert read.increase_of("w0", "w1") == 0.1
    assert read.increase_of("w1", "w1") == 0.0, "faster beside another is noise"
    with pytest.raises(KeyError, match="w1 beside w0"):
        read.increase_of("w1", "w0")
    with pytest.raises(KeyError):
        read.increase_of("w1", "P")


@pytest.mark.parametrize(
    ("like", "unlike", "said"),
    [(0.6, 0.1, "interfere less, as"), (0.1, 0.6, "interfere more here"), (0.31, 0.29, "no difference")],
)
def test_it_says_whether_unlike_pairs_interfere_less(like: float, unlike: float, said: str) -> None:
    comparison = matrix([[like, unlike], [unlike, like]]).compare()
    assert comparison is not None
    assert (comparison.like, comparison.unlike) == (like, unlike)
    assert said in str(comparison)
    assert matrix([[like, unlike], [unlike, like]]).with_findings().findings == [f"operators: {comparison}"]


def test_without_unlike_pairs_there_is_nothing_to_compare() -> None:
    assert matrix([[0.1, 0.1], [0.1, 0.1]], ["compute", "compute"]).compare() is None
    assert matrix([[0.1, 0.1], [0.1, 0.1]]).compare("stage") is None


def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(ValueError, match=r"m\.json: No such file.*epd-serve interference"):
        InterferenceMatrix.read(path)
    data = msgspec.to_builtins(matrix([[0.5, 0.1], [0.2, 0.0]]))
    for change, message in (
        ({"increase": [[0.5, 0.1]]}, "a row and a column for each of the 2"),
        ({"increase": [[0.5, -1.5], [0.0, 0.0]]}, "above -1"),
        ({"workloads": [data["workloads"][0]] * 2}, "each is listed once"),
        ({"isolation": "thread"}, "isolation"),
        ({"surprise": 1}, "surprise"),
    ):
        path.write_bytes(msgspec.json.encode(data | change))
        with pytest.raises(ValueError, match=message):
            InterferenceMatrix.read(path)
