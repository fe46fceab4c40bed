"""Send one streamed chat request and time its answer; ask a server which model it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from time import perf_counter
from urllib.parse import urlsplit

import aiohttp
import msgspec

from device.datasheets import emulated_kind
from epd_serve.bench.answer import Answer, error_message
from epd_serve.bench.types import Failure, RunSettings

_CONNECT_TIMEOUT_S = 10.0
#: uvicorn closes idle connections after 5 s; close ours earlier.
_KEEP_ALIVE_S = 4.0
#: aiohttp warns about larger bodies written in one piece.
_PIECE_BYTES = 1 << 20
#: A gateway may delay its first answer until its instances have loaded their model.
_MEET_TIMEOUT = aiohttp.ClientTimeout(total=60)


def open_session(base_url: str, api_key: str | None) -> aiohttp.ClientSession:
    """Return a session without a limit on connections.

    Raises ValueError unless the URL is http(s), without a password.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is not a server URL; it should look like 'http://127.0.0.1:8000'")
    if parts.username is not None or parts.password is not None:
        raise ValueError("--base-url must not contain a user or password; put a key into OPENAI_API_KEY")
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=1 << 20,
    )


async def send(
    http: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float
) -> Answer:
    """Send a streamed chat request and return its answer or failure. Cancelling closes the connection."""
    answer = Answer(sent_s=perf_counter())
    data = body if len(body) <= _PIECE_BYTES else _split(body)
    sized = {**headers, "Content-Length": str(len(body))}  # aiohttp would send a split body chunked
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.post(url, data=data, headers=sized, allow_redirects=False) as response,
        ):
            answer.status = response.status
            if response.status != 200 or response.content_type != "text/event-stream":
                message = error_message(await response.read())
                if response.status == 200:
                    answer.fail(Failure.MALFORMED, f"the answer is not an event stream: {message}")
                answer.fail(Failure.HTTP_STATUS, message)
            async for piece in response.content.iter_any():
                answer.feed(piece, perf_counter())
            answer.end(complete=True)
    except aiohttp.ClientConnectorError as error:
        answer.fail(Failure.CONNECT, error.os_error.strerror or str(error))
    except aiohttp.ServerTimeoutError:
        answer.fail(Failure.CONNECT, f"no connection within {_CONNECT_TIMEOUT_S:g} s")
    except TimeoutError:
        answer.fail(Failure.TIMEOUT, f"not finished within {timeout_s:g} s")
    except aiohttp.ClientResponseError as error:
        answer.fail(Failure.MALFORMED, f"not HTTP: {error.message}")
    except (aiohttp.ClientError, OSError) as error:
        if not answer.status:
            answer.fail(Failure.CONNECTION_LOST, str(error) or "the connection closed before the answer")
        answer.end(complete=False, reason=str(error))
    answer.finish_s = perf_counter()
    return answer


async def _split(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Instance(msgspec.Struct):
    device: str | None = None


class _Dashboard(msgspec.Struct):
    """The fields of an epd-serve gateway's /dashboard/data that a run records."""

    version: str
    topology: str | None = None
    instances: list[_Instance] = []


async def describe_server(http: aiohttp.ClientSession, settings: RunSettings) -> None:
    """Set the model of ``settings`` and, for an epd-serve gateway, its topology, version and emulated devices.

    Raises ValueError if the server does not answer, lacks the model, or has several models and none is named.
    """
    url, model = settings.base_url, settings.model
    try:
        async with http.get(f"{url}/v1/models", timeout=_MEET_TIMEOUT) as answer:
            body = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ValueError(f"no answer from {url}/v1/models: {error}; is --base-url right?") from error
    if answer.status == 401:
        raise ValueError(f"{url} refuses the API key (HTTP 401: {error_message(body)}); export OPENAI_API_KEY=KEY")
    try:
        names = [one.id for one in msgspec.json.decode(body, type=_Models).data]
    except msgspec.MsgspecError:
        raise ValueError(
            f"{url}/v1/models: status {answer.status}: {error_message(body)}; is --base-url right?"
        ) from None
    if (model and model not in names) or (not model and len(names) != 1):
        raise ValueError(f"{url} serves the models {', '.join(names) or '(none)'}; choose one with --model")
    settings.model = model or names[0]
    try:
        async with http.get(f"{url}/dashboard/data", timeout=_MEET_TIMEOUT) as answer:
            dashboard = msgspec.json.decode(await answer.read(), type=_Dashboard)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):  # not an epd-serve gateway
        return
    devices = {one.device for one in dashboard.instances if one.device and one.device.startswith("emulated:")}
    kinds = ", ".join(sorted({emulated_kind(one) for one in devices}))
    settings.topology, settings.emulated = dashboard.topology or "", f"emulated {kinds}" if kinds else ""
    settings.versions = {**settings.versions, "server": f"epd-serve {dashboard.version}"}
