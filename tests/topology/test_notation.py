import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.topology import Group, Member, Topology, TopologyError, parse_topology
from epd_serve.types import Role, Stage

ROLES = st.sets(st.sampled_from(list(Stage)), min_size=1).map(Role.of)
COUNTS = st.integers(1, 14)  # five units of four members stay below MAX_COUNT instances
MEMBERS = st.builds(Member, role=ROLES, count=COUNTS, tensor_parallel=st.integers(1, 16))
GROUPS = st.builds(Group, members=st.lists(MEMBERS, min_size=1, max_size=4).map(tuple), count=COUNTS).filter(
    lambda group: len(group.members) > 1 or group.members[0].count > 1
)
TOPOLOGIES = (
    st.lists(MEMBERS | GROUPS, min_size=1, max_size=5)
    .map(lambda units: Topology(units=tuple(units)))
    .filter(lambda topology: {Stage.PREFILL, Stage.DECODE} <= topology.stages)
)


@given(TOPOLOGIES)
def test_what_is_printed_reads_back_as_the_same_topology(topology: Topology) -> None:
    assert parse_topology(str(topology)) == topology


@given(TOPOLOGIES, st.data())
def test_spaces_around_symbols_change_nothing(topology: Topology, data: st.DataObject) -> None:
    spaced = "".join(
        f"{data.draw(st.sampled_from(['', ' ', '  ']))}{character} " if character in "-()" else character
        for character in str(topology)
    )
    assert parse_topology(spaced) == topology


@given(st.text(alphabet="EPDX()-@tp0129 é²٠٣", max_size=24))
def test_any_text_is_read_or_refused_at_a_position_inside_it(text: str) -> None:
    try:
        topology = parse_topology(text)
    except TopologyError as error:
        assert 0 <= error.position <= len(text)
        assert str(error).startswith(f"topology {text!r}, position {error.position + 1}: ")
    else:
        assert parse_topology(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("2(E-P)-1D", "2(E-P)-D"),
        ("DPE", "EPD"),
        ("D-P-E", "D-P-E"),
        ("(EPD)", "EPD"),
        ("3(ED)-P", "3ED-P"),
        ("2(2E)-P-D", "2(2E)-P-D"),
        ("E-P-D@tp1", "E-P-D"),
        ("(E-P@tp2)-D", "(E-P@tp2)-D"),
    ],
)
def test_printing_is_canonical(text: str, canonical: str) -> None:
    assert str(parse_topology(text)) == canonical


@pytest.mark.parametrize(
    ("text", "devices", "instances"),
    [
        ("EPD", 1, 1),
        ("E-P-D", 3, 3),
        ("(E-P)-D", 2, 3),
        ("4E-8P-20D", 32, 32),
        ("2(E-P)-1D", 3, 5),
        ("E-P-D@tp2", 4, 3),
        ("2(2E-P@tp2)-3D@tp4", 16, 9),
    ],
)
def test_counts_of_devices_and_instances(text: str, devices: int, instances: int) -> None:
    topology = parse_topology(text)
    assert (topology.num_devices, topology.num_instances) == (devices, instances)


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 0, "empty"),
        ("E", 1, "no instance prefills"),
        ("E-P", 3, "no instance decodes"),
        ("E-P-", 4, "missing at the end"),
        ("(E-P-D", 0, "not closed"),
        ("E-P)-D", 3, "closes nothing"),
        ("EE-P-D", 1, "write '2E'"),
        ("0E-P-D", 0, "count of 0"),
        ("e-p-d", 0, "write E"),
        ("E-X-P-D", 2, "not a stage"),
        ("E2-P-D", 1, "not 'E2'"),
        ("((E-P)-D)", 1, "do not nest"),
        ("(E-P)@tp2-D", 5, "write it inside"),
        ("E-P-D@", 5, "as in 'D@tp2'"),
        ("E-P-D@tp", 8, "needs a number"),
        ("E-P-D@tp0", 8, "width of 0"),
        ("E-P-D@tp\u0660", 8, "needs a number"),
        ("\u0663E-P-D", 0, "expected letters"),
        ("E-P-D\u00b2", 5, "not a stage"),
        ("()-D", 1, "not ')'"),
        ("E--P", 2, "not '-'"),
        ("E P D", 2, "expected '-'"),
        ("99999999E-P-D", 0, "above 4096"),
        ("4096(4096E-4096P)-D", 0, "33554433 instances exceed the limit of 4096"),
    ],
)
def test_errors_point_at_the_fault_and_say_what_would_be_right(text: str, position: int, words: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(text)
    assert caught.value.position == position
    assert words in caught.value.problem
    assert str(caught.value).endswith(f"\n    {text}\n    {' ' * position}^")
