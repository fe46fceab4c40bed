"""A chat in the terminal with any server that speaks OpenAI's chat API; answers are shown while they come."""

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

#: Of a terminal's control sequences, all but ends of lines and tabs: a model's text is no command to it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HELP = "/image FILE adds a picture to the next question, /clear begins anew, /quit ends. Ctrl-C stops an answer."


class Chat:
    """One conversation.

    Args:
        url: of the server, with or without ``/v1``.
        model: None: the only one, or the first, that the server has.
    """

    def __init__(self, url: str, *, model: str | None, key: str | None, timeout_s: float = 600.0) -> None:
        """Raises ValueError where no such server answers."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {url}: write it as in http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        # a proxy of the environment would look for the address on its own machine
        proxies: dict[str, str] | None = {} if is_loopback(urlsplit(url).hostname or "") else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
        self._timeout_s = timeout_s
        self.model = model or self._first_model()
        self._messages: list[dict[str, Any]] = []

    def clear(self) -> None:
        self._messages.clear()

    def ask(self, text: str, pictures: Sequence[str] = ()) -> Iterator[str]:
        """The pieces of an answer; a question without a whole answer is no part of the conversation.

        ``pictures`` are data URLs or addresses. Raises ValueError where the server refuses or goes away.
        """
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        asked = [*self._messages, {"role": "user", "content": content}]
        answer = ""
        for data in self._events({"model": self.model, "messages": asked, "stream": True}):
            if "error" in data:
                raise ValueError(_said(data) or "the server broke the answer off")
            for choice in data.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content") or ""
                answer += piece
                yield _CONTROL.sub("", piece)
        self._messages = [*asked, {"role": "assistant", "content": answer}]

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        reason: object = "it ended early"
        with self._open("/v1/chat/completions", body) as answer:
            try:
                for line in answer:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield json.loads(data)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                reason = error
        raise ValueError(f"{self.url} broke the answer off: {reason}")

    def _first_model(self) -> str:
        with self._open("/v1/models") as answer:
            try:
                return str(json.load(answer)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{self.url}/v1/models lists no model; is it an OpenAI API?") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data=data, headers=headers)
            return self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    said = _said(json.load(error))
                except ValueError:
                    said = ""
            hint = "; set OPENAI_API_KEY to a key of it" if error.code == 401 else ""
            raise ValueError(f"{self.url} answered {error.code}: {said or error.reason}{hint}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise ValueError(
                f"nothing answers at {self.url} ({reason}); start a deployment with 'epd-serve up', or "
                "name another server with --base-url"
            ) from error


def talk(chat: Chat, read: Callable[[str], str], write: Callable[[str], None], pictures: list[str]) -> bool:
    """Read questions until the end of the input, and write the answers; ``pictures`` go with the first.

    Return whether nothing was refused and nothing failed.
    """
    is_good = True
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return is_good
        command, _, rest = line.partition(" ")
        if not line:
            continue
        if command in ("/quit", "/exit"):
            return is_good
        if command == "/clear":
            chat.clear()
            pictures.clear()
        elif command == "/image":
            try:
                pictures.append(picture(rest.strip()))
                write("The picture goes with your next question.\n")
            except ValueError as error:
                write(f"{error}\n")
                is_good = False
        elif command.startswith("/"):
            write(f"{_HELP}\n")
        else:
            is_good = _answer(chat, line, write, pictures) and is_good


def _answer(chat: Chat, line: str, write: Callable[[str], None], pictures: list[str]) -> bool:
    """Write an answer; return whether it came. The pictures are dropped, unless the answer was stopped."""
    answer = chat.ask(line, pictures)
    is_good = True
    try:
        for piece in answer:
            write(piece)
        pictures.clear()
    except KeyboardInterrupt:
        write(" (stopped)")
    except ValueError as error:
        write(str(error))
        if pictures:
            write("\nThe pictures are dropped; add others with /image.")
            pictures.clear()
        is_good = False
    finally:
        answer.close()  # type: ignore[attr-defined]
    write("\n")
    return is_good


def picture(place: str) -> str:
    """A picture's file as a data URL, or its address as it is. Raises ValueError for a file that is none."""
    if place.startswith(("http://", "https://", "data:")):
        return place
    path = Path(place.strip("'\"")).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _said(content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")
