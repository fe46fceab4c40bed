"""Control calls over TLS: both ends show a certificate of the deployment's CA, and a fault is named at once."""

import asyncio
import contextlib

import pytest
from certificates import Authority
from links import linked

from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.errors import InstanceLost
from epd_serve.instance.calls import Peers
from epd_serve.protocol import wire
from epd_serve.rpc.link import Link
from epd_serve.rpc.server import Reply
from epd_serve.rpc.tls import TLS_CA, TLS_CERT, TLS_KEY, TlsFiles, tls_files

KEY = "0123456789abcdef-"
#: Of a call that goes wrong: a handshake, its alert, and a busy machine.
AT_ONCE_S = 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def ours(authority):
    return authority.files("ours")


@contextlib.asynccontextmanager
async def instance(tls, key=None):
    """URL of an instance with these files, which answers with what it was sent."""

    async def answer(body):
        return Reply(body=body)

    async with linked({"/kv/renew": answer}, key, **tls.server_options) as url:
        yield url.replace("http:", "https:")


async def asked(url, tls, key=None):
    async with asyncio.timeout(AT_ONCE_S), Link("d0", url, key, tls=tls) as link:
        return await link.ask("/kv/renew", [b"a prompt"])


@pytest.mark.parametrize("key", [None, KEY])
async def test_calls_go_over_tls_with_and_without_a_cluster_key(ours, key, monkeypatch):
    ref = wire.TransferRef("t", "r")
    monkeypatch.setenv("EPD_SERVE_CLUSTER_KEY", key or "")
    for name, value in ours.environment.items():
        monkeypatch.setenv(name, value)
    async with instance(ours, key) as url:
        peers = Peers()
        assert await peers.call(url, "/kv/renew", ref) == wire.encode(ref)
        await peers.close()
        async with Link("d0", url, key, tls=ours) as link:
            bodies = [b"%d" % number * 70_000 for number in range(4)]
            calls = [link.ask("/kv/renew", [body], 1 << 20) for body in bodies]
            assert await asyncio.gather(*calls) == bodies


async def test_a_fault_of_either_end_is_named_at_once(authority, other, ours, monkeypatch):
    expired, elsewhere = authority.files("expired", days=-1), authority.files("elsewhere", ip="10.9.8.7")
    strange, misled = other.files("strange", ca=authority), authority.files("misled", ca=other)
    no_issuer, unwelcome = "unable to get local issuer|self-signed", "does not accept the client's certificate"

    async def check(server, client, words):
        async with instance(server) as url:
            with pytest.raises(InstanceLost, match=f"(?i){words}") as lost:
                await asked(url, client)
        assert "d0" in lost.value.message

    await check(strange, ours, no_issuer)
    await check(ours, misled, no_issuer)
    await check(expired, ours, "certificate has expired")
    await check(elsewhere, ours, "IP address mismatch")
    await check(ours, None, no_issuer)  # of no public CA
    await check(ours, strange, unwelcome)
    await check(ours, expired, unwelcome)
    monkeypatch.setenv("SSL_CERT_FILE", str(ours.ca))  # it trusts the server all the same
    await check(ours, None, unwelcome)


async def test_a_plain_call_and_a_plain_server_are_told_apart(ours):
    async with instance(ours) as url:
        with pytest.raises(InstanceLost, match="d0"):
            await asked(url.replace("https:", "http:"), ours)
    async with linked({}) as url:
        with pytest.raises(InstanceLost, match=r"(?i)wrong.version.number|record layer failure"):
            await asked(url.replace("http:", "https:"), ours)


async def test_a_server_that_never_shakes_hands_is_given_up(ours, monkeypatch):
    monkeypatch.setattr("epd_serve.rpc.link.TLS_HANDSHAKE_S", 0.5)
    held = []
    server = await asyncio.start_server(lambda reader, writer: held.append(writer), "127.0.0.1", 0)
    async with server:
        with pytest.raises(InstanceLost, match="d0"):
            await asked(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", ours)
        for writer in held:
            writer.close()


async def test_the_gateways_calls_have_the_files_of_its_settings(ours):
    async with instance(ours, KEY) as url, NativeConnections(KEY, ours) as connections:
        native = NativeInstance(connections, "d0", url)
        with pytest.raises(Exception, match="no such call: /info"):  # it was reached, and has no more to say
            await native.info()


def test_files_are_looked_at_when_a_process_starts(authority, other, ours, tmp_path):
    ours.check("127.0.0.1")
    ours.check(None)
    for host in (None, "0.0.0.0", "::"):
        authority.files("n2", ip="10.0.0.2").check(host)
    junk = tmp_path / "junk.pem"
    junk.write_text("nothing")
    for files, words in (
        (authority.files("late", days=-1), "certificate has expired"),
        (other.files("foreign", ca=authority), "unable to get local issuer certificate"),
        (authority.files("n3", ip="10.0.0.3"), "IP address mismatch"),
        (TlsFiles(ca=tmp_path / "none.pem", cert=ours.cert, key=ours.key), "tls.ca: .*none.pem: No such file"),
        (TlsFiles(ca=junk, cert=ours.cert, key=ours.key), "tls.ca: .*junk.pem is not a PEM certificate"),
        (TlsFiles(ca=ours.ca, cert=junk, key=ours.key), "are not a PEM certificate and its private key"),
        (TlsFiles(ca=ours.ca, cert=ours.cert, key=authority.files("n4").key), "are not a PEM certificate"),
    ):
        with pytest.raises(ValueError, match=words):
            files.check("127.0.0.1")


def test_the_environment_names_all_three_files_or_none(ours):
    assert tls_files({}) is None
    assert tls_files({TLS_CA: "", TLS_CERT: " "}) is None
    assert tls_files(ours.environment) == ours
    with pytest.raises(ValueError, match=f"{TLS_CERT} is set and {TLS_CA}, {TLS_KEY} is not"):
        tls_files({TLS_CERT: "cert.pem"})
