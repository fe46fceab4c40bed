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


def test_equal_replicas_are_drawn_once() -> None:
    picture = draw(parse_topology("4E-8P-20D@tp2"))
    assert "4 × device 0…3" in picture
    assert "20 × device 12…51" in picture
    assert "d0…d19" in picture


def test_plain_words_for_each_device() -> None:
    assert explain(parse_topology("2E-PD@tp2")) == [
        "2 × device 0…1: e0…e1 encode images.",
        "device 2…3: pd0 prefills prompts and decodes tokens, each on 2 devices.",
        "Features (encoder output) travel from the encoding to the prefilling instances.",
    ]
    assert explain(parse_topology("P-D"))[-1].startswith("No instance is for encoding")
