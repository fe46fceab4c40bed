"""``epd-serve chat``: chat in the terminal with any server of OpenAI's chat API."""

from __future__ import annotations

import base64
import http.client
import json
import mimetypes
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from epd_serve.cli.admin import Deployment, server_url
from epd_serve.cli.flags import BaseUrl
from epd_serve.protocol.addresses import is_loopback

#: Terminal control characters except line feeds and tabs, so that a model cannot control the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HELP = "/image FILE adds an image to the next question, /clear starts over, Ctrl-D quits, Ctrl-C stops an answer."


def chat(
    image: Annotated[
        list[Path] | None, typer.Option(exists=True, help="An image for the first question; repeatable.")
    ] = None,
    base_url: BaseUrl = "",
    deployment: Deployment = None,
    model: Annotated[str | None, typer.Option(help="Model; required if the server has several.")] = None,
) -> None:
    """Chat with a model and stream its answers. '/image FILE' adds an image to a question.

    The default server is this machine's running deployment. If the standard input is not a terminal, questions
    are read from it, and the exit code is 1 after an error. OPENAI_API_KEY is sent if set.
    """
    pictures, messages = [_picture(str(file)) for file in image or ()], list[dict[str, Any]]()
    url = server_url(base_url, deployment)
    with _open(url, "/v1/models") as answer:
        names = [str(one["id"]) for one in json.load(answer)["data"]]
    if model is None and len(names) != 1:
        raise ValueError(f"--model is missing; the server has {', '.join(names) or 'no model'}")
    model = model or names[0]
    is_terminal, num_errors = sys.stdin.isatty(), 0
    if is_terminal:
        import readline  # noqa: F401  # arrow keys and history

        typer.echo(f"{model} at {url}. {_HELP}")
    while True:
        try:
            command, _, rest = (line := input("> " if is_terminal else "").strip()).partition(" ")
        except (EOFError, KeyboardInterrupt):
            break
        try:
            if command == "/clear":
                messages.clear()
                pictures.clear()
            elif command == "/image":
                pictures.append(_picture(rest.strip()))
            elif command.startswith("/"):
                typer.echo(_HELP)
            elif line:
                parts = [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
                pictures.clear()  # dropped even if the question is refused
                asked = {"role": "user", "content": [*parts, {"type": "text", "text": line}] if parts else line}
                said = ""
                for thought, piece in _ask(url, {"model": model, "messages": [*messages, asked], "stream": True}):
                    said += piece
                    typer.secho(_CONTROL.sub("", thought or piece), nl=False, dim=bool(thought))
                typer.echo()
                messages += [asked, {"role": "assistant", "content": said}]
        except KeyboardInterrupt:
            typer.echo(" (stopped)")
        except (OSError, ValueError) as error:
            num_errors += 1
            typer.echo(error)
    if num_errors and not is_terminal:
        raise typer.Exit(1)


def _ask(url: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield pieces of reasoning and answer. Raises ValueError if the server refuses or aborts."""
    reason = "it ended early"
    with _open(url, "/v1/chat/completions", body) as events:
        try:
            for data in (line[5:].strip() for line in events if line.startswith(b"data:")):
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    reason = event["error"]["message"]
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    yield delta.get("reasoning_content") or "", delta.get("content") or ""
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
    raise ValueError(f"{url} aborted the answer: {reason}")


def _open(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    # A proxy would resolve a loopback address to its own machine.
    proxies: dict[str, str] | None = {} if is_loopback(urlsplit(url).hostname or "") else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    try:
        data = None if body is None else json.dumps(body).encode()
        return opener.open(urllib.request.Request(url + path, data, headers), timeout=600.0)
    except urllib.error.HTTPError as error:
        hint = "; set OPENAI_API_KEY to one of its keys" if error.code == 401 else ""
        said = error.read().decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):  # not of OpenAI's form
            said = json.loads(said)["error"]["message"]
        raise ValueError(f"{url} answered {error.code}: {said}{hint}") from error
    except (OSError, http.client.HTTPException) as error:
        hint = "start a deployment with 'epd-serve up', or name another server with --base-url"
        raise ValueError(f"nothing answers at {url} ({getattr(error, 'reason', error)}); {hint}") from error


def _picture(place: str) -> str:
    """Return an image file as a data URL, or a URL unchanged. Raises OSError."""
    if place.startswith(("http://", "https://")):
        return place
    path = Path(place).expanduser()
    data = base64.b64encode(path.read_bytes()).decode()
    return f"data:{mimetypes.guess_type(path.name)[0] or 'image/png'};base64,{data}"
