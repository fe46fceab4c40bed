"""HTTP to servers that answer what the test says."""

import asyncio
import re

import pytest
from own_ports import free_port

from epd_serve.errors import InstanceLost, InstanceUnreachable, InvalidRequest, Unavailable
from epd_serve.rpc import http
from epd_serve.rpc.admin import AdminClient, AdminUnreachable
from epd_serve.rpc.http import HttpPool, HttpServer

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Played:
    """Answers each request with the next of ``answers``: pieces, of which None closes the connection."""

    def __init__(self):
        self.answers = []
        self.requests = []
        self.num_connections = 0
        self.http: HttpServer

    async def serve(self, reader, writer):
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                self.requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def played():
    server = Played()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with HttpPool() as pool:
        server.http = HttpServer("p0", f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/", pool)
        yield server
    listening.close()


HALVES = [None], [OK[:-1], None], [CHUNKED + b"3\r\nabc\r\n", None], [b"nonsense\r\n\r\n"]


@pytest.mark.parametrize("answer", HALVES, ids=range(4))
async def test_half_and_wrong_answers_are_a_lost_instance(played, answer):
    played.answers = [answer, [OK]]
    with pytest.raises(InstanceLost, match="p0"):
        await played.http.ask("POST", "/stage", b"body")
    assert await played.http.ask("POST", "/stage", b"body") == b"hi"


async def test_an_error_is_the_servers_own(played):
    body = b'{"error":{"message":"no such thing","type":"t"}}'
    played.answers = [[b"HTTP/1.1 400 Bad\r\ncontent-length: %d\r\n\r\n" % len(body), body]]
    with pytest.raises(InvalidRequest, match="no such thing"):
        await played.http.ask("GET", "/")


async def test_an_answer_without_end_is_not_collected(played, monkeypatch):
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 100_000)
    piece = b"10000\r\n" + b"e" * 65536 + b"\r\n"
    played.answers = [[CHUNKED, *[piece] * 200], [b"HTTP/1.1 503 No" + CHUNKED[15:], *[piece] * 200]]
    with pytest.raises(InstanceLost, match="answered with more than 100000 bytes"):
        await played.http.ask("GET", "/info")
    with pytest.raises(Unavailable, match="p0 answered 503: eeee") as caught:
        await played.http.ask("GET", "/info")
    assert len(caught.value.message) < 300


async def test_no_server_at_all():
    async with HttpPool() as pool:
        with pytest.raises(InstanceUnreachable, match=r"instance p0 at .* is not reachable") as caught:
            await HttpServer("p0", f"http://127.0.0.1:{free_port('127.0.0.1')}", pool).ask("GET", "/info")
        assert caught.value.is_refused
        for url in ("http://a..b:8000", f"http://{'a' * 70}:8000"):
            with pytest.raises(InstanceLost):
                await HttpServer("p0", url, pool).ask("GET", "/info")
        with pytest.raises(ValueError, match="as in 'http:"):
            HttpServer("p0", "10.0.0.1:9000", pool)


@pytest.mark.parametrize("url", ["localhost:9001", "http://localhost:99999", "admin"])
async def test_the_admin_api_is_asked_at_a_url(url):
    with pytest.raises(AdminUnreachable, match="is not the URL of an admin API"):
        await AdminClient(url).ask("GET", "/instances")
