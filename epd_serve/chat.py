"""A chat in the terminal with any server that speaks OpenAI's chat API."""

from __future__ import annotations

import base64
import http.client
import json
import mimetypes
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from epd_serve.protocol.addresses import is_loopback

#: Control sequences of a terminal, but line feeds and tabs: a model must not command the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HELP = "/image FILE adds a picture to the next question, /clear begins anew, /quit ends, Ctrl-C stops.\n"


class Chat:
    """One conversation with ``model``, by default the first that the server at ``url`` lists.

    Raises ValueError where no such server answers.
    """

    def __init__(self, url: str, *, model: str | None, key: str | None, timeout_s: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {url}: write it as in http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # A proxy would look for a loopback address on its own machine.
        proxies: dict[str, str] | None = {} if is_loopback(urlsplit(url).hostname or "") else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        self._timeout_s = timeout_s
        self.model = model or self._first_model()
        self.messages: list[dict[str, Any]] = []

    def ask(self, text: str, pictures: Sequence[str] = ()) -> Iterator[str]:
        """Yield the pieces of an answer; keep question and answer once the answer is whole.

        ``pictures`` are data URLs or addresses. Raises ValueError where the server refuses or goes away.
        """
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
        asked = [*self.messages, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        if not pictures:
            asked[-1]["content"] = text
        answer, end = "", "it ended early"
        body = {"model": self.model, "messages": asked, "stream": True}
        with self._open("/v1/chat/completions", body) as events:
            try:
                for data in (line[5:].strip() for line in events if line.startswith(b"data:")):
                    if data == b"[DONE]":
                        self.messages = [*asked, {"role": "assistant", "content": answer}]
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(_message(event) or "the server broke the answer off")
                    for choice in event.get("choices") or ():
                        piece = (choice.get("delta") or {}).get("content") or ""
                        answer += piece
                        yield _CONTROL.sub("", piece)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                end = str(error)
        raise ValueError(f"{self.url} broke the answer off: {end}")

    def _first_model(self) -> str:
        with self._open("/v1/models") as answer:
            try:
                return str(json.load(answer)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{self.url}/v1/models lists no model; is it an OpenAI API?") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            return self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                said = _message(error.read()) or error.reason
            hint = "; set OPENAI_API_KEY to a key of it" if error.code == 401 else ""
            raise ValueError(f"{self.url} answered {error.code}: {said}{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise ValueError(
                f"nothing answers at {self.url} ({reason}); start a deployment with 'epd-serve up', or "
                "name another server with --base-url"
            ) from error


def talk(chat: Chat, read: Callable[[str], str], write: Callable[[str], None], pictures: list[str]) -> bool:
    """Read questions until the input ends, and write the answers; ``pictures`` go with the first question.

    A refused question loses its pictures. Return whether every command and every question succeeded.
    """
    is_good = True
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return is_good
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return is_good
        try:
            if command == "/clear":
                chat.messages.clear()
                pictures.clear()
            elif command == "/image":
                pictures.append(picture(rest.strip()))
                write("The picture goes with your next question.\n")
            elif command.startswith("/"):
                write(_HELP)
            elif line:
                for piece in chat.ask(line, pictures):
                    write(piece)
                pictures.clear()
                write("\n")
        except KeyboardInterrupt:
            write(" (stopped)\n")
        except ValueError as error:
            is_good = False
            write(f"{error}\n")
            if pictures and command != "/image":
                write("The pictures are dropped; add others with /image.\n")
                pictures.clear()


def picture(place: str) -> str:
    """Return a picture's file as a data URL, or an address as it is. Raises ValueError for an unreadable file."""
    if place.startswith(("http://", "https://", "data:")):
        return place
    path = Path(place.strip("'\"")).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _message(answer: Any) -> str:
    """Return the message of an error as OpenAI's API writes it; "" where there is none."""
    try:
        content = json.loads(answer) if isinstance(answer, bytes) else answer
        return str(content["error"].get("message") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
