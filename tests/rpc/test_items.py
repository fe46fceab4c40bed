"""Items come out as they went in, however the bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from item_bodies import whole_items

from epd_serve.rpc import items
from epd_serve.rpc.messages import LENGTH, LinkClosed

ITEMS = st.lists(
    st.tuples(st.integers(0, 300), st.lists(st.integers(0, 2**32 - 1), max_size=4), st.binary(max_size=40)),
    max_size=8,
)


def packed(wanted):
    return b"".join(items.pack(*item) for item in wanted)


@given(ITEMS, st.lists(st.integers(1, 30), max_size=40), st.booleans())
def test_items_survive_any_cutting(wanted, cuts, ends):
    wanted = [*wanted, (items.END, [7], b"data: [DONE]\n\n")] if ends else wanted
    data, reader, found = packed(wanted), items.ItemReader(), b""
    assert whole_items(data) == wanted
    for cut in (*cuts, len(data) + 1):
        chunk, data = data[:cut], data[cut:]
        found += reader.read(chunk)
    assert found == b"".join(events for *_, events in wanted)
    assert reader.tokens == [token for _, tokens, _ in wanted for token in tokens]
    assert reader.ended == reader.is_over == ends and reader.error is None


@given(ITEMS, ITEMS)
def test_nothing_is_read_behind_an_error(before, behind):
    reader = items.ItemReader()
    found = reader.read(packed([*before, (items.ERROR, [], b"what went wrong"), *behind]))
    assert found == b"".join(events for *_, events in before)
    assert reader.error == b"what went wrong" and reader.is_over and not reader.ended
    assert reader.tokens == [token for _, tokens, _ in before for token in tokens]


@pytest.mark.parametrize("data", [b"\3\0\0\0abc", LENGTH.pack(items.MAX_BYTES + 1), items.pack(0, ["a"], b"")])
def test_what_is_no_item_is_refused(data):
    with pytest.raises(LinkClosed):
        items.ItemReader().read(data)
