import pytest

from epd_serve.topology import parse_topology, place


def placed(text: str, *devices: str) -> dict[str, tuple[str, ...]]:
    return {instance.name: instance.devices for instance in place(parse_topology(text), devices)}


def test_instances_take_devices_in_the_order_written() -> None:
    assert placed("E-P-D", "npu:0", "npu:3", "npu:1") == {"e0": ("npu:0",), "p0": ("npu:3",), "d0": ("npu:1",)}


def test_a_group_shares_one_device_and_says_with_whom() -> None:
    instances = {i.name: i for i in place(parse_topology("2(E-P)-D"), ["cuda:0", "cuda:1", "cuda:2"])}
    assert instances["e0"].devices == instances["p0"].devices == ("cuda:0",)
    assert instances["e1"].devices == instances["p1"].devices == ("cuda:1",)
    assert instances["e1"].shares_device_with == ("p1",)
    assert instances["d0"].shares_device_with == ()


def test_tensor_parallel_instances_take_several_devices_and_narrower_partners_the_first_of_them() -> None:
    found = placed("(E-P@tp2)-D@tp2", *(f"cuda:{index}" for index in range(4)))
    assert found == {"e0": ("cuda:0",), "p0": ("cuda:0", "cuda:1"), "d0": ("cuda:2", "cuda:3")}


def test_names_count_per_role_over_the_whole_line() -> None:
    assert list(placed("E-(E-P)-2EPD-PD", "cpu")) == ["e0", "e1", "p0", "epd0", "epd1", "pd0"]


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("E-P-D", ["npu:0", "npu:1"], r"E-P-D needs 3 devices, but the list has 2 \(npu:0, npu:1\)"),
        ("EPD", [], r"EPD needs 1 device, but the list has 0 \(none\)"),
        ("E-P-D", ["cuda:0", "cpu"], "needs 3 devices, but the list has 2"),
        ("P-D", ["cuda:0", "cuda:0"], "cuda:0 is listed 2 times"),
    ],
)
def test_devices_that_do_not_suffice_are_refused(text: str, devices: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed(text, *devices)
