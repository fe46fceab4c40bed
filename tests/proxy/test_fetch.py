"""Media by URL: limits, redirects, and the addresses that a URL may lead to."""

import asyncio
import gzip
import ipaddress
import threading
from functools import partial
from urllib.parse import quote

import pytest
from aiohttp import web
from gateway_settings import gateway_settings
from hypothesis import given
from hypothesis import strategies as st
from program import until
from servers import answered

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.protocol.openai.messages import MediaSource
from proxy.media import fetch
from proxy.media import resolver as lookups
from proxy.media.fetch import MediaFetcher
from proxy.media.loader import MediaLoader
from proxy.media.resolver import is_public, parse_address

PRIVATE_V4 = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
]
PRIVATE_V6 = [
    *("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "100::/64", "2001:db8::/32", "5f00::/16", "fc00::/7"),
    *("fe80::/10", "fec0::/10", "ff00::/8"),
]


def inside(networks):
    return st.sampled_from(networks).flatmap(lambda network: st.ip_addresses(network=network))


@given(inside(PRIVATE_V4))
def test_private_ipv4_is_refused_in_every_wrapping(address):
    assert not is_public(address)
    number = int(address)
    for wrapped in (
        *(f"::ffff:{address}", f"64:ff9b::{address}", number),
        *((0x2002 << 112) | (number << 80), (0x20010000 << 96) | (number ^ 0xFFFFFFFF)),
    ):
        assert not is_public(ipaddress.IPv6Address(wrapped)), wrapped


@given(inside(PRIVATE_V6))
def test_private_ipv6_is_refused(address):
    assert not is_public(address)
    assert not is_public(parse_address(f"{address}%eth0"))


@pytest.mark.parametrize(
    "text", ["8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"]
)
def test_public_addresses_are_allowed(text):
    assert is_public(parse_address(text))


@pytest.fixture
async def site():
    """A web server on all IPv4 loopback addresses; yields its port and the requests, as host:port/path."""
    hits = []

    async def answer(request):
        hits.append(f"{request.host}{request.path}")
        match request.path.strip("/").split("/"):
            case ["signed", *_]:
                return web.Response(text=request.raw_path)
            case ["image"]:
                return web.Response(body=b"picture")
            case ["hop", count] if int(count) > 0:
                raise web.HTTPFound(f"/hop/{int(count) - 1}")
            case ["hop", _]:
                return web.Response(body=b"arrived")
            case ["away"]:
                return web.Response(status=307, headers={"location": request.query["to"]})
            case ["slow"]:
                await asyncio.sleep(30)
            case ["compressed"]:
                return web.Response(body=gzip.compress(bytes(50_000_000)), headers={"content-encoding": "gzip"})
            case ["trickle" | "large" as kind]:
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(100):
                    await response.write(b"x" * (1000 if kind == "large" else 1))
                    await asyncio.sleep(0.02 * (kind == "trickle"))
                return response
        raise web.HTTPNotFound

    async with answered(answer, host="0.0.0.0") as port:
        yield port, hits


def fetcher(timeout_s=60.0, max_bytes=5000, **media):
    return MediaFetcher(gateway_settings(max_body_bytes=max_bytes, media=media), timeout_s)


@pytest.fixture
def choosy(monkeypatch):
    """A fetcher to which no address but the first is public."""
    monkeypatch.setattr(fetch, "is_public", lambda address: str(address) == "127.0.0.1")
    return partial(fetcher, allow_private=False)


async def test_fetch_and_redirects(site):
    port, _ = site
    async with fetcher() as fetch:
        assert await fetch.fetch(f"http://127.0.0.1:{port}/image") == b"picture"
        assert await fetch.fetch(f"HTTP://localhost:{port}/hop/3") == b"arrived"
        with pytest.raises(InvalidRequest, match="more than 3 redirects"):
            await fetch.fetch(f"http://127.0.0.1:{port}/hop/4")


@pytest.mark.parametrize(
    "path, sent",
    [
        ("/signed/a%2Fb%20c/d?key=a%2Fb+c%3D&to=%C3%BC", None),
        ("/signed/über uns?q=ä#part", "/signed/%C3%BCber%20uns?q=%C3%A4"),
        ("/signed/x: y", "/signed/x:%20y"),
    ],
)
async def test_path_and_query_are_sent_as_they_came(site, path, sent):
    port, _ = site
    async with fetcher() as fetch:
        for url in (f"http://127.0.0.1:{port}{path}", f"http://127.0.0.1:{port}/away?to={quote(path, safe='')}"):
            assert (await fetch.fetch(url)).decode() == (sent or path)
        assert await fetch.fetch(f"http://127.0.0.1:{port}/signed/\rhost: x") == b"/signed/%0Dhost:%20x"


async def test_concurrent_requests_fetch_a_url_once(site):
    port, hits = site
    url = f"http://127.0.0.1:{port}/image"
    async with fetcher() as fetch:
        asked = [asyncio.create_task(fetch.fetch(url)) for _ in range(32)]
        await asyncio.sleep(0)
        assert fetch.is_fetching(url)
        for left in asked[:8]:
            left.cancel()
        assert {await one for one in asked[8:]} == {b"picture"}
        assert len(hits) == 1 and not fetch.is_fetching(url)
        only = asyncio.create_task(fetch.fetch(f"http://127.0.0.1:{port}/slow"))
        await asyncio.sleep(0)
        only.cancel()
        assert await fetch.fetch(f"http://127.0.0.1:{port}/image") == b"picture"


async def test_a_proxy_of_the_environment_fetches_where_it_may(site, monkeypatch):
    port, hits = site
    monkeypatch.setenv("http_proxy", f"http://alice:s3cret@127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "localhost")
    async with fetcher(trust_env=True, allow_private=False) as fetch:
        assert await fetch.fetch("http://pictures.example/image") == b"picture"
        assert hits == ["pictures.example/image"]
        with pytest.raises(InvalidRequest, match="cannot be fetched"):
            await fetch.fetch(f"http://localhost:{port}/image")
    async with fetcher(allow_private=False) as fetch:
        with pytest.raises(InvalidRequest, match="cannot be fetched"):
            await fetch.fetch("http://pictures.example/image")
    assert len(hits) == 1


async def test_limits_of_size_and_time(site):
    port, _ = site
    async with fetcher() as fetch:
        with pytest.raises(TooLarge, match="more than 5000 bytes"):
            await fetch.fetch(f"http://127.0.0.1:{port}/large")
        with pytest.raises(InvalidRequest, match="compressed it despite"):  # it would unpack to 50 MB
            await fetch.fetch(f"http://127.0.0.1:{port}/compressed")
    async with fetcher(timeout_s=0.2) as fetch:
        with pytest.raises(InvalidRequest, match=r"/slow' cannot be fetched: .* within 0\.2 s"):
            await fetch.fetch(f"http://127.0.0.1:{port}/slow")
        with pytest.raises(InvalidRequest, match=r"/trickle' cannot be fetched: .* within 0\.2 s"):
            await fetch.fetch(f"http://127.0.0.1:{port}/trickle")


async def test_only_allowed_domains_are_asked_redirects_included(site):
    port, hits = site
    rules = {"allowed_domains": ("127.0.0.1", "*.example.com")}
    async with fetcher(**rules) as fetch:
        assert await fetch.fetch(f"http://127.0.0.1:{port}/image") == b"picture"
        hits.clear()
        for url, words in (
            (f"http://localhost:{port}/image", "fetching from localhost is not allowed; allowed: 127"),
            (f"http://127.0.0.1.evil.test:{port}/image", "fetching from 127.*is not allowed"),
            (f"http://example.com:{port}/image", r"from example\.com"),
            (f"http://badexample.com:{port}/image", r"from badexample\.com"),
            (f"http://evil.test\\@127.0.0.1:{port}/image", "the media URL"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await fetch.fetch(url)
        assert hits == []
        with pytest.raises(InvalidRequest, match="redirects to a forbidden address"):
            await fetch.fetch(f"http://127.0.0.1:{port}/away?to=http://localhost:{port}/image")
        assert len(hits) == 1
        with pytest.raises(InvalidRequest, match="cannot be fetched"):  # allowed, and not there
            await fetch.fetch(f"http://IMG.example.com.:{port}/x")


@pytest.mark.parametrize(
    "target",
    [
        *("data:image/png;base64,AAAA", "file:///etc/passwd", "http://user:pass@127.0.0.1/x"),
        *("http://127.0.0.1:99999/x", "/image"),
    ],
)
async def test_where_redirects_may_lead(site, target):
    url = f"http://127.0.0.1:{site[0]}/away?to={quote(target)}"
    async with fetcher() as fetch:
        if target == "/image":
            assert await fetch.fetch(url) == b"picture"
        else:
            with pytest.raises(InvalidRequest, match="redirects to a forbidden address"):
                await fetch.fetch(url)


async def test_no_password_is_sent_or_shown(site):
    port, hits = site
    async with fetcher() as fetch:
        with pytest.raises(InvalidRequest, match="user name or a password") as refusal:
            await fetch.fetch(f"http://alice:s3cret@127.0.0.1:{port}/image")
        assert "s3cret" not in refusal.value.message and hits == []
        with pytest.raises(InvalidRequest, match="at most 8192 are accepted"):
            await fetch.fetch(f"http://127.0.0.1:{port}/" + "x" * 9000)


@pytest.mark.parametrize(
    "host", ["127.0.0.2", "127.0.0.2.", "[::ffff:127.0.0.2]", "2130706434", "0x7f000002", "127.2"]
)
async def test_a_refused_address_is_never_connected_to_however_it_is_spelt(site, choosy, host):
    port, hits = site
    async with choosy() as fetch:
        assert await fetch.fetch(f"http://127.0.0.1:{port}/image") == b"picture"
        hits.clear()
        with pytest.raises(InvalidRequest):
            await fetch.fetch(f"http://{host}:{port}/image")
    assert hits == []


async def test_the_internal_network_cannot_be_explored(site, choosy):
    """Refused, unknown, silent, no HTTP: one answer, and nothing of what a server sent."""
    port, _ = site

    async def banner(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.9 secret\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(banner, "127.0.0.1", 0)
    silenced = []
    silent = await asyncio.start_server(lambda reader, writer: silenced.append(writer), "127.0.0.1", 0)
    speaks, says_nothing = (one.sockets[0].getsockname()[1] for one in (other, silent))
    answers = set()
    async with choosy(timeout_s=0.5) as fetch:
        for place in (
            *("127.0.0.1:1", f"127.0.0.1:{speaks}", f"127.0.0.1:{says_nothing}", f"127.0.0.2:{port}"),
            *("no-such-host.invalid", f"127.0.0.1:{port}/slow?"),
            f"127.0.0.1:{port}/away?to=http://127.0.0.2:1/secret&",
        ):
            url = f"http://{place}/x.png"
            with pytest.raises(InvalidRequest) as refused:
                await fetch.fetch(url)
            answers.add(refused.value.message.replace(url, "URL"))
    assert len(answers) == 1, answers
    assert not any("secret" in answer or "SSH" in answer for answer in answers)
    for one in (other, silent, *silenced):
        one.close()


async def test_the_resolved_address_is_checked(site, choosy, monkeypatch):
    """A name that changes its address between check and use (DNS rebinding) gains nothing."""
    port, hits = site
    answers = iter(["127.0.0.1", "127.0.0.2"])

    def resolve(host, port, **_):
        return [(2, 1, 6, "", (next(answers), port))]

    monkeypatch.setattr(lookups.socket, "getaddrinfo", resolve)
    async with choosy() as fetch:
        assert await fetch.fetch(f"http://rebinding.example:{port}/image") == b"picture"
    async with choosy() as fetch:
        with pytest.raises(InvalidRequest, match="must be reachable for this gateway"):
            await fetch.fetch(f"http://rebinding.example:{port}/image")
    assert len(hits) == 1


async def test_dead_names_of_one_request_hold_up_no_other(site, monkeypatch):
    port, loop = site[0], asyncio.get_running_loop()
    look_up, dead, release = lookups.socket.getaddrinfo, set(), threading.Event()

    def stall(host, *args, **options):
        if host.startswith("dead"):
            dead.add(host)
            release.wait(300)
        return look_up("127.0.0.1" if host.endswith(".example") else host, *args, **options)

    monkeypatch.setattr(lookups.socket, "getaddrinfo", stall)
    monkeypatch.setattr(lookups, "TIMEOUT_S", 300)
    async with fetcher() as fetch:
        loader, loads = MediaLoader(gateway_settings(), fetch), []
        for letter in "ab":
            urls = [f"http://dead-{letter}-{number}.example:{port}/image" for number in range(60)]
            loads.append(loop.create_task(loader.load([MediaSource(url=url, param="") for url in urls])))
        await until(lambda: len(dead) >= 8)
        for host in ("good.example", "127.0.0.1"):
            assert await fetch.fetch(f"http://{host}:{port}/image") == b"picture"
        assert (await loop.getaddrinfo("good.example", port))[0][4][0] == "127.0.0.1", "an instance's name"
        assert not any(load.done() for load in loads)
        release.set()
        await asyncio.gather(*loads, return_exceptions=True)  # no pictures
        loader.close()


async def test_waiting_for_a_name_has_an_end(monkeypatch):
    """And a name that is still looked up has its place among those that may be."""
    entered, release = [], threading.Event()

    def never(*_args, **_options):
        entered.append(None)
        release.wait(300)
        return []

    monkeypatch.setattr(lookups.socket, "getaddrinfo", never)
    monkeypatch.setattr(lookups, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(lookups, "MAX_LOOKUPS", 1)
    names = lookups.Lookups()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await names.resolve("silent.example", 80)
    assert len(entered) == 1
    release.set()
    monkeypatch.setattr(lookups, "TIMEOUT_S", 300)
    assert await names.resolve("silent.example", 80) == []


ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "chunks of one byte": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 4000),
    "chunk extensions": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;a=", b"b" * 20_000),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_framing_without_end_is_broken_off(kind):
    num_sent, head, flood = 0, *ENDLESS[kind]

    async def serve(reader, writer):
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        try:
            while True:
                writer.write(flood)
                await writer.drain()
                num_sent += len(flood)
        except OSError:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with fetcher(timeout_s=100, max_bytes=1 << 20) as media:
            with pytest.raises(InvalidRequest, match="cannot be fetched"):
                await media.fetch(f"http://127.0.0.1:{port}/x.png")
    assert num_sent < 30 << 20, "what sockets hold on both sides, and no more"
