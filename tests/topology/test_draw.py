import pytest

from epd_serve.topology import draw, explain, parse_topology


def test_a_shared_device_is_one_box() -> None:
    assert (
        draw(parse_topology("(E-P)-D"))
        == """\
          ┌─ device 0 ──────────┐  ┌─ device 1 ─┐
          │ ┌───────┐ ┌───────┐ │  │ ┌───────┐  │
          │ │ e0    │ │ p0    │ │  │ │ d0    │  │
          │ │ E     │ │ P     │ │  │ │ D     │  │
          │ └─────┬─┘ └─┬───┬─┘ │  │ └─┬─────┘  │
          └───────┼─────┼───┼───┘  └───┼────────┘
                  │     ▲   │          ▲
features          └─────┘   │          │
                            │          │
KV                          └──────────┘"""
    )


def test_a_single_instance_has_no_transfers() -> None:
    assert (
        draw(parse_topology("EPD"))
        == """\
┌─ device 0 ─┐
│ ┌───────┐  │
│ │ epd0  │  │
│ │ EPD   │  │
│ └───────┘  │
└────────────┘"""
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
def test_transfers_are_drawn_and_explained_where_they_happen(text: str, features: bool, kv: bool) -> None:
    topology = parse_topology(text)
    rows = draw(topology).splitlines()
    assert any(row.startswith("features") for row in rows) == features
    assert any(row.startswith("KV") for row in rows) == kv
    sentences = " ".join(explain(topology))
    assert ("Features" in sentences) == features
    assert ("KV cache travels" in sentences) == kv
