"""The ``epd-serve`` command: one file for each of its commands."""

from __future__ import annotations

import io
import os
import sys

import typer

from epd_serve.cli.apply import apply
from epd_serve.cli.autoscale import autoscale
from epd_serve.cli.bench import bench
from epd_serve.cli.cost import cost
from epd_serve.cli.devices import devices
from epd_serve.cli.instance import instance
from epd_serve.cli.interference import interference
from epd_serve.cli.key import key_app
from epd_serve.cli.plan import plan
from epd_serve.cli.profile import profile
from epd_serve.cli.proxy import proxy
from epd_serve.cli.schema import schema
from epd_serve.cli.switch import switch
from epd_serve.cli.topology import topology
from epd_serve.cli.trace import trace
from epd_serve.cli.up import up
from epd_serve.cli.version import version

app = typer.Typer(
    name="epd-serve",
    help="Serve multimodal LLMs as separate Encode, Prefill and Decode instances behind one OpenAI API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    *(up, proxy, instance, topology, devices, apply, autoscale, interference),
    *(bench, cost, plan, profile, switch, trace, schema, version),
):
    app.command()(_command)
app.add_typer(key_app, name="key")


def main() -> None:
    """A user's mistake is one line on stderr and exit code 2; EPD_SERVE_TRACEBACK=1 shows where it was found."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for what it lacks
    try:
        app()
    except ValueError as error:
        if os.environ.get("EPD_SERVE_TRACEBACK") == "1":
            raise
        print(f"epd-serve: {error}", file=sys.stderr)
        sys.exit(2)
