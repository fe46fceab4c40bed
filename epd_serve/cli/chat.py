"""``epd-serve chat``: a chat in the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.flags import BaseUrl


def chat(
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture for the first question; once for each.")
    ] = None,
    base_url: BaseUrl = "",
    model: Annotated[str | None, typer.Option(help="Where the server has several.")] = None,
) -> None:
    """Chat with a model; answers are shown while they come. '/image FILE' adds a picture to a question.

    Without --base-url it is the deployment that runs here.

    Questions are read from the standard input where that is no terminal; then the exit code is 1 after an error.
    OPENAI_API_KEY is sent where it is set.
    """
    from epd_serve.chat import Chat, picture, talk

    pictures = [picture(str(file)) for file in image or ()]
    conversation = Chat(base_url or _running(), model=model, key=os.environ.get("OPENAI_API_KEY") or None)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # arrow keys and history

        typer.echo(f"{conversation.model} at {conversation.url}. /help lists commands, Ctrl-D ends.")

    def write(text: str) -> None:
        typer.echo(text, nl=False)

    is_good = talk(conversation, lambda prompt: input(prompt if is_terminal else ""), write, pictures)
    if is_terminal:
        typer.echo()
    elif not is_good:
        raise typer.Exit(1)


def _running() -> str:
    """The URL of the deployment that runs on this machine, or the one that it would have."""
    from epd_serve.launch.processes.runs import find_run, running

    urls = {name: _url_of(run.address) for name, run in running().items()}
    if not urls:
        return "http://127.0.0.1:8000"
    try:
        return urls[find_run(None, 8000)[0]]
    except ValueError:
        raise ValueError(
            f"several deployments are running; choose one with --base-url: {', '.join(urls.values())}"
        ) from None


def _url_of(address: str) -> str:
    from epd_serve.protocol.addresses import url_of

    host, _, port = address.rpartition(":")
    return url_of(host, int(port))
