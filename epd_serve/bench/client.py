"""One streamed chat request over aiohttp, sent once and timed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from time import perf_counter
from urllib.parse import urlsplit

import aiohttp

from epd_serve.bench.answer import Answer, error_message
from epd_serve.bench.types import Failure

_CONNECT_TIMEOUT_S = 10.0
#: uvicorn closes idle connections after 5 s; do not send on one that is about to close.
_KEEP_ALIVE_S = 4.0
#: aiohttp warns of bodies above 1 MiB that are written in one piece.
_PIECE_BYTES = 1 << 20


def open_session(base_url: str, api_key: str | None) -> aiohttp.ClientSession:
    """Return a session with as many connections as there are requests at once.

    Raises ValueError for a URL that is not http(s), or that holds a password.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is no URL of a server; it should look like 'http://127.0.0.1:8000'")
    if parts.username is not None or parts.password is not None:
        raise ValueError("--base-url must hold no user and no password; put a key into OPENAI_API_KEY")
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
    """Send a streamed chat and read its answer, or why it failed. Cancelling closes the connection."""
    answer = Answer(sent_s=perf_counter())
    data = body if len(body) <= _PIECE_BYTES else _pieces(body)
    sized = {**headers, "Content-Length": str(len(body))}  # a body in pieces would be sent chunked
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.post(url, data=data, headers=sized, allow_redirects=False) as response,
        ):
            answer.status = response.status
            if response.status != 200 or response.content_type != "text/event-stream":
                message = error_message(await response.read())
                if response.status == 200:
                    answer.fail(Failure.MALFORMED, f"the answer is no stream of events: {message}")
                answer.fail(Failure.HTTP_STATUS, message)
            async for piece in response.content.iter_any():
                answer.feed(piece, perf_counter())
            answer.end(complete=True)
    except aiohttp.ClientConnectorError as error:
        answer.fail(Failure.CONNECT, error.os_error.strerror or str(error))
    except aiohttp.ServerTimeoutError:
        answer.fail(Failure.CONNECT, f"no connection in {_CONNECT_TIMEOUT_S:g} s")
    except TimeoutError:
        answer.fail(Failure.TIMEOUT, f"not finished within {timeout_s:g} s")
    except aiohttp.ClientResponseError as error:
        answer.fail(Failure.MALFORMED, f"no HTTP: {error.message}")
    except (aiohttp.ClientError, OSError) as error:
        if not answer.status:
            answer.fail(Failure.CONNECTION_LOST, str(error) or "the connection was closed before an answer")
        answer.end(complete=False, reason=str(error))
    answer.finish_s = perf_counter()
    return answer


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
