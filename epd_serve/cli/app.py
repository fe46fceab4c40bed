"""All commands in groups, each imported when it is called."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from epd_serve.cli import ended_by_ctrl_c
from epd_serve.imports import uncollected

_SETTINGS: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}
#: Commands by group, with an example. A command is the function in the module of the same name.
GROUPS: dict[str, dict[str, str]] = {
    "Serve": {
        "up": "epd-serve up Qwen/Qwen2.5-VL-3B-Instruct --topology '(E-P)-D'",
        "down": "epd-serve down --deployment deployment.yaml",
        "chat": "epd-serve chat --image photo.jpg",
        "instance": "epd-serve instance --name e0 --role E --port 8100",
        "proxy": "epd-serve proxy --instance e0=http://127.0.0.1:8100",
        "render": "epd-serve render kubernetes deployment.yaml | kubectl apply -f -",
    },
    "Operate": {
        "apply": "epd-serve apply deployment.yaml --dry-run",
        "status": "epd-serve status",
        "switch": "epd-serve switch p0 D",
        "autoscale": "epd-serve autoscale deployment.yaml --admin http://127.0.0.1:8001",
        "logs": "epd-serve logs p0 --follow",
        "trace": "epd-serve trace ./trace -o trace.json",
        "key": "epd-serve key new alice",
    },
    "Measure": {
        "bench": "epd-serve bench --base-url http://127.0.0.1:8000 --rates 1,2,4",
        "verify": "epd-serve verify --base-url http://127.0.0.1:8000 --suite api --suite answers",
        "profile": "epd-serve profile costs.json --model ./model --device cuda:0",
    },
    "Plan": {
        "topology": "epd-serve topology '2(E-P)-D'",
        "plan": "epd-serve plan --workload sharegpt4o-like --rate 8 --devices 'h200 x 2' --model qwen2.5-vl-7b",
        "cost": "epd-serve cost qwen2.5-vl-7b --encoder rtx-4090 --language a100",
    },
    "Look up": {
        "devices": "epd-serve devices --check",
        "schema": "epd-serve schema > schema.json",
    },
}


class Commands(TyperGroup):
    """The commands of :data:`GROUPS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for group in GROUPS.values() for name in group]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        example = next((group[cmd_name] for group in GROUPS.values() if cmd_name in group), None)
        return None if example is None else _load(cmd_name, example)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, _summary(name)) for name in group])


def _load(name: str, example: str) -> Any:
    with ended_by_ctrl_c(), uncollected():
        made = getattr(import_module(f"epd_serve.cli.{name}"), name)
    app = made if isinstance(made, typer.Typer) else typer.Typer(add_completion=False, **_SETTINGS)
    if app is not made:
        unknown = {"allow_extra_args": True, "ignore_unknown_options": True} if name == "up" else {}
        app.command(name, context_settings=unknown)(made)
    command = typer.main.get_command(app)
    command.name, command.epilog = name, f"\b\nExample:\n  {example}"
    return command


def _summary(name: str) -> str:
    """Return the first paragraph of a command's help from its source, which is faster than importing it."""
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    command = next((one for one in functions if one.name == name), functions[0])
    return " ".join((ast.get_docstring(command) or "").split("\n\n")[0].split())


def _version(asked: bool) -> None:
    if asked:
        from epd_serve import __version__

        typer.echo(f"epd-serve {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="epd-serve",
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="'epd-serve COMMAND -h' shows a command's options and an example.",
    **_SETTINGS,
)


@app.callback()
def epd_serve(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve multimodal LLMs as separate Encode, Prefill and Decode instances behind one OpenAI API."""
