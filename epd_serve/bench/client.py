"""Send one streamed chat request and time its answer; ask a server which model it serves."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from device.datasheets import emulated_kind
from epd_serve.bench.types import Failure, RunSettings

_MAX_DETAIL_CHARS = 400
_CONNECT_TIMEOUT_S = 10.0
#: uvicorn closes idle connections after 5 s; close ours earlier.
_KEEP_ALIVE_S = 4.0
#: A gateway may delay its first answer until its instances have loaded their model.
_MEET_TIMEOUT = aiohttp.ClientTimeout(total=60)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None

    def error_text(self, data: bytes) -> str:
        """Return the message of an error whose JSON is ``data``."""
        if isinstance(self.error, dict) and isinstance(self.error.get("message"), str):
            return str(self.error["message"])[:_MAX_DETAIL_CHARS]
        return self.message[:_MAX_DETAIL_CHARS] if self.message else _quote(data)


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True, eq=False)
class Answer:
    """Reads server-sent events as their bytes arrive. All times are ``perf_counter`` seconds."""

    sent_s: float = 0.0  # sending began; connecting follows
    finish_s: float = 0.0  # the last byte came, or the failure was known
    status: int = 0  # 0 before the response's head
    first_chunk_s: float | None = None
    last_event_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # pieces of the first choice's content
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    failure: Failure | None = None  # the first fault; later events are ignored
    detail: str = ""
    _buffer: bytes = b""
    _event_name: bytes = b""
    _empty_times_s: list[float] = field(default_factory=list)
    _is_finished: dict[int, bool] = field(default_factory=dict)  # by choice
    _done: bool = False

    def fail(self, failure: Failure, detail: str) -> None:
        """Record a failure unless one is recorded already."""
        if self.failure is None:
            self.failure, self.detail = failure, detail

    def feed(self, data: bytes, at_s: float) -> None:
        """Parse the next bytes of the body, which arrived at ``at_s``."""
        lines = (self._buffer + data).split(b"\n")
        self._buffer = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip(), at_s)
            elif not line:
                self._event_name = b""
            elif line.startswith(b"event:"):
                self._event_name = line[6:].strip()

    def end(self, *, complete: bool, reason: str = "") -> None:
        """End the body.

        Args:
            complete: whether the body is complete by HTTP's rules.
            reason: the connection error of an incomplete body.
        """
        if self.failure is not None:
            return
        if not complete and not self._done:
            self.fail(Failure.CUT_STREAM, reason or "the connection closed in mid-stream")
        elif not self._is_finished or not all(self._is_finished.values()):
            if self._done:
                self.fail(Failure.NO_FINISH_REASON, "[DONE] came without a finish_reason")
            elif self._buffer.startswith(b"data:") or self.first_chunk_s is not None:
                self.fail(Failure.CUT_STREAM, "the answer ended with neither a finish_reason nor [DONE]")
            else:
                self.fail(Failure.MALFORMED, "the answer contains no event")
        elif not self.token_times_s:
            if not self.completion_tokens or not self._empty_times_s:
                self.fail(Failure.NO_TOKENS, "the answer contains no token")
                return
            # only special tokens: count the last events, as many as the server's usage says
            self.token_times_s = self._empty_times_s[-self.completion_tokens :]

    def _read_event(self, data: bytes, at_s: float) -> None:
        if self.failure is not None:
            return
        if self.first_chunk_s is None:
            self.first_chunk_s = at_s
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decoder.decode(data)
        except ValueError as error:  # also invalid UTF-8
            self.fail(Failure.MALFORMED, f"{error}: {_quote(data)}")
            return
        if chunk.error is not None or chunk.object == "error" or self._event_name == b"error":
            self.fail(Failure.IN_STREAM_ERROR, chunk.error_text(data))
            return
        if (usage := chunk.usage) is not None:
            if usage.prompt_tokens is not None:
                self.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                self.completion_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        has_token = False
        for choice in chunk.choices or ():
            has_token |= self._read_choice(choice, at_s)
        if has_token:
            self.token_times_s.append(at_s)
            self.last_event_s = at_s
            self._empty_times_s.clear()

    def _read_choice(self, choice: _Choice, at_s: float) -> bool:
        """Read one choice of an event; return whether it contains a token."""
        self._is_finished.setdefault(choice.index, False)
        if choice.finish_reason:
            self._is_finished[choice.index] = True
            self.finish_reason = choice.finish_reason
            self.last_event_s = at_s
        delta = choice.delta
        content = choice.text if delta is None else delta.content
        if content and choice.index == 0:
            self.text.append(content)
        if content or (content is not None and self.token_times_s):
            return True
        if content is not None:
            self._empty_times_s.append(at_s)
        return delta is not None and bool(
            delta.reasoning_content or delta.reasoning or delta.tool_calls or delta.refusal
        )


def _quote(data: bytes) -> str:
    return data[:_MAX_DETAIL_CHARS].decode("utf-8", "replace") or "nothing"


def _error_message(body: bytes) -> str:
    """Return the message of an error response, or the beginning of the body."""
    try:
        return _decoder.decode(body).error_text(body)
    except ValueError:  # also invalid UTF-8
        return _quote(body)


def open_session(base_url: str, api_key: str | None, *, force_close: bool = False) -> aiohttp.ClientSession:
    """Return a session without a limit on connections; with ``force_close`` each request has its own connection.

    Raises ValueError unless the URL is http(s), without a password.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{base_url!r} is not a server URL; it should look like 'http://127.0.0.1:8000'")
    if parts.username is not None or parts.password is not None:
        raise ValueError("--base-url must not contain a user or password; put a key into OPENAI_API_KEY")
    kept = {"force_close": True} if force_close else {"keepalive_timeout": _KEEP_ALIVE_S}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **kept),
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
    try:
        async with (
            asyncio.timeout(timeout_s),
            # as a file, which aiohttp sends in pieces without a copy
            http.post(url, data=io.BytesIO(body), headers=headers, allow_redirects=False) as response,
        ):
            answer.status = response.status
            if response.status != 200 or response.content_type != "text/event-stream":
                message = _error_message(await response.read())
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


class _Instance(msgspec.Struct):
    device: str | None = None


class _Dashboard(msgspec.Struct):
    """The fields of an epd-serve gateway's /dashboard/data that a run records."""

    version: str
    topology: str | None = None
    instances: list[_Instance] = []


async def model_names(http: aiohttp.ClientSession, url: str) -> list[str]:
    """Return the models that a server lists. Raises ValueError if it does not answer or refuses the key."""
    try:
        async with http.get(f"{url}/v1/models", timeout=_MEET_TIMEOUT) as answer:
            body = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        hint = "does a deployment run ('epd-serve up'), and is --base-url right?"
        raise ValueError(f"no answer from {url}/v1/models: {error}; {hint}") from error
    if answer.status == 401:
        said = _error_message(body)
        raise ValueError(f"{url} refuses the API key (HTTP 401: {said}); export OPENAI_API_KEY=KEY")
    try:
        return [str(one["id"]) for one in msgspec.json.decode(body)["data"]]
    except (ValueError, LookupError, TypeError):
        said = _error_message(body)
        raise ValueError(f"{url}/v1/models: status {answer.status}: {said}; is --base-url right?") from None


async def describe_server(http: aiohttp.ClientSession, settings: RunSettings) -> None:
    """Set the model of ``settings`` and, for an epd-serve gateway, its topology, version and emulated devices.

    Raises ValueError if the server does not answer, lacks the model, or has several models and none is named.
    """
    url, model, names = settings.base_url, settings.model, await model_names(http, settings.base_url)
    if (model and model not in names) or (not model and len(names) != 1):
        lacks = f", but not {model}" if model else ""
        raise ValueError(f"{url} serves the models {', '.join(names) or '(none)'}{lacks}; choose one with --model")
    settings.model = model or names[0]
    try:
        async with http.get(f"{url}/dashboard/data", timeout=_MEET_TIMEOUT) as answer:
            dashboard = msgspec.json.decode(await answer.read(), type=_Dashboard)
    except (aiohttp.ClientError, TimeoutError, ValueError):  # not an epd-serve gateway
        return
    devices = {one.device for one in dashboard.instances if one.device and one.device.startswith("emulated:")}
    kinds = ", ".join(sorted({emulated_kind(one) for one in devices}))
    settings.topology, settings.emulated = dashboard.topology or "", f"emulated {kinds}" if kinds else ""
    settings.versions = {**settings.versions, "server": f"epd-serve {dashboard.version}"}
