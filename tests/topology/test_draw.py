import pytest

from epd_serve.topology import parse_topology
from epd_serve.topology.draw import draw, explain


def test_a_shared_device_is_one_box() -> None:
    assert (
        draw(parse_topology("(E-P)-D"))
        == """\
┌─ device 0 ───┐ ┌─ device 1 ─┐
│ ┌────┐┌────┐ │ │ ┌────┐     │
│ │ e0 ││ p0 │ │ │ │ d0 │     │
│ │ E  ││ P  │ │ │ │ D  │     │
│ └────┘└────┘ │ │ └────┘     │
└──────────────┘ └────────────┘"""
    )


@pytest.mark.parametrize(
    ("text", "features", "kv"),
    [
        ("EP-D", False, True),
        ("E-P-D", True, True),
        ("(E-D)-P", True, True),
        ("(E-PD)", True, False),
        ("ED-P", True, True),
        ("2EPD", False, False),
        ("P-D", False, True),
        ("E-EP-D", True, True),
    ],
)
def test_transfers_are_explained_where_they_happen(text: str, features: bool, kv: bool) -> None:
    sentences = " ".join(explain(parse_topology(text)))
    assert ("Features" in sentences) == features
    assert ("KV cache travels" in sentences) == kv
