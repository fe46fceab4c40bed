"""Chunks that are taken out at once are what the parser makes of them, however the bytes come."""

from itertools import pairwise

import httptools
from hypothesis import example, given
from hypothesis import strategies as st

from epd_serve.backends.http_chunks import whole_chunks
from epd_serve.backends.http_connection import Connection

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
PIECES = st.sampled_from([b"\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"data: {}\n\n", b"x" * 700, b"y" * 2100])
CONTENTS = st.lists(st.lists(PIECES, min_size=1, max_size=4).map(b"".join), max_size=8)
SIZES = st.sampled_from([b"%x", b"%X", b"0%x", b"%x;a=b"])


class Transport:
    def __init__(self):
        self.aborted = False

    def writelines(self, data):
        pass

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True


class Pool:
    def __init__(self):
        self.num_back = 0

    def put_back(self, connection):
        self.num_back += 1


class Call:
    """What a connection tells."""

    request = (b"",)

    def __init__(self):
        self.status, self.body, self.has_ended, self.failure = 0, b"", False, None

    def begin(self, status, headers):
        self.status = status

    def feed(self, pieces):
        self.body += b"".join(pieces)
        pieces.clear()

    def end(self):
        self.has_ended = True

    def lost(self, reason):
        return reason

    def fail(self, reason):
        self.failure = reason


def received(reads, times=1):
    """What came of the same answer, ``times`` on one connection."""
    pool, calls = Pool(), []
    connection = Connection(pool)
    connection.connection_made(Transport())
    for _ in range(times):
        calls.append(Call())
        connection.begin(calls[-1])
        for data in reads:
            connection.data_received(data)
        if calls[-1].failure is not None:
            break
    return pool, calls


def told_by_the_parser(data):
    class Protocol:
        body, has_ended = b"", False

        def on_body(self, piece):
            self.body += piece

        def on_message_complete(self):
            self.has_ended = True

    protocol = Protocol()
    httptools.HttpResponseParser(protocol).feed_data(data)
    return protocol.body, protocol.has_ended


@given(
    CONTENTS, st.lists(SIZES, min_size=8, max_size=8), st.lists(st.integers(0, 9000), max_size=3), st.booleans()
)
@example([b"x" * 700] * 8, [b"%x"] * 8, [], True)
@example([b"x" * 700] * 8, [b"%x"] * 8, [len(HEAD)], True)
@example([b"x" * 700, b"y"] * 4, [b"%x"] * 8, [len(HEAD) + 800, len(HEAD) + 1500], True)
@example([b"x" * 1500 + b"\r\n" + END], [b"%x"] * 8, [len(HEAD) + 1507 + len(END)], False)
def test_a_body_is_the_same_however_it_comes(contents, sizes, cuts, is_complete):
    chunks = [size % len(one) + b"\r\n" + one + b"\r\n" for one, size in zip(contents, sizes, strict=False)]
    data = HEAD + b"".join(chunks) + (END if is_complete else b"")
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reads = [data[start:stop] for start, stop in pairwise(places) if start < stop]
    body, has_ended = told_by_the_parser(data)
    assert (body, has_ended) == (b"".join(contents), is_complete)
    pool, calls = received(reads, times=2 if is_complete else 1)
    for call in calls:
        assert (call.status, call.body, call.has_ended) == (200, body, has_ended)
    assert pool.num_back == len(calls) * is_complete


def test_a_broken_body_is_refused_as_before():
    good = b"2bc\r\n" + b"x" * 700 + b"\r\n"
    for bad in (b"2bd\r\n" + b"x" * 700 + b"\r\n", b"zz\r\nx\r\n", b"2bc\r\n" + b"x" * 700 + b"yy"):
        _, [call] = received([HEAD + good * 2 + bad + good * 2 + END])
        assert not call.has_ended and call.failure is not None, bad
    _, [call] = received([HEAD + good * 2, b"2bd\r\n" + b"x" * 700 + b"\r\n" + good + END])
    assert not call.has_ended and call.failure is not None


def test_many_small_chunks_are_taken_out_at_once():
    good = b"5\r\nhello\r\n"
    assert whole_chunks(good * 100 + END) == ([b"hello"] * 100, END)
    assert whole_chunks(good * 100) == ([b"hello"] * 100, b"")
    assert whole_chunks(good + b"5\r\nhel") is None
    assert whole_chunks(good + b"5\r\nhel\r\n") is None
    assert whole_chunks(good + b"5\r\n") is None


def test_the_parser_sees_none_of_them():
    connection = Connection(Pool())
    connection.connection_made(Transport())
    call = Call()
    connection.begin(call)
    connection.data_received(HEAD)
    many = [b"5\r\nhello\r\n" * 200, b"5\r\nhello\r\n" * 200 + END]
    seen = []
    parser = connection._parser

    class Watched:
        def feed_data(self, data):
            seen.append(data)
            parser.feed_data(data)

        def should_keep_alive(self):
            return parser.should_keep_alive()

    connection._parser = Watched()
    for data in many:
        connection.data_received(data)
    assert seen == [END]
    assert call.has_ended and call.body == b"hello" * 400
