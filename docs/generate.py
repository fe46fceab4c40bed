"""Writes the pages of docs/reference and deploy/schema.json: ``python docs/generate.py``."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from epd_serve.cli.app import app
from epd_serve.config import DeploymentConfig, deployment_schema
from epd_serve.config.sections import Section
from epd_serve.models.families import FAMILIES
from epd_serve.models.not_run import NOT_RUN
from epd_serve.types import PLURALS

ROOT = Path(__file__).parents[1]

OPTIONS = """# Options of a deployment file

Made from the fields of `epd_serve/config` by `python docs/generate.py`. An editor completes and checks them with
[deploy/schema.json](../../deploy/schema.json). [How to add an option](../../CONTRIBUTING.md#how-to-add).
"""

CLI = """# The command line

Made from the commands by `python docs/generate.py`.
"""

MODELS = """# Models of the native engine

Made from `epd_serve/models/families` by `python docs/generate.py`.
[How to add a family](../../CONTRIBUTING.md#how-to-add).

| models | `model_type` | takes | decoder | tower | how an item is laid out |
|---|---|---|---|---|---|
"""

MODELS_END = """
With the fused decoder, the language model of all but Qwen's is Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE, whose
experts are computed by transformers.
The generic decoder runs transformers' own layers over the paged cache, on one device, without graphs.
LLaVA-OneVision takes each of several pictures in tiles, as it takes one.

The float32 greedy tokens of a tiny random model of each family are those of transformers' `generate`
(`pytest -m "slow or not slow" tests/models/test_pictures.py tests/end_to_end/test_identity.py`).
Of published checkpoints, none of the families with tiles or rows has been run.
"""


NOT_RUN_TITLE = """
Others are refused by name; the [vLLM engine](../guide/vllm.md) runs many of them. These the native
engine cannot run:

| `model_type` | |
|---|---|
"""


def models_page() -> str:
    rows = []
    for family in dict.fromkeys(one for families in FAMILIES.values() for one in families):
        types, towers = (", ".join(f"`{name}`" for name in names) for names in (family.model_types, family.towers))
        about = " ".join((family.__doc__ or "").split()).removesuffix(".") if family.modalities else ""
        takes = ", ".join(("text", *(PLURALS[name] for name in family.modalities)))
        rows.append(f"| {' | '.join(map(cell, (family.title, types, takes, family.decoder, towers, about)))} |\n")
    reasons = ""
    for reason in dict.fromkeys(NOT_RUN.values()):
        same = ", ".join(f"`{name}`" for name, other in NOT_RUN.items() if other == reason)
        reasons += f"| {same} | {reason} |\n"
    return MODELS + "".join(rows) + MODELS_END + NOT_RUN_TITLE + reasons


def section_of(annotation: Any) -> type[Section] | None:
    """The section in ``Section``, ``Section | None`` or ``tuple[Section, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return next(filter(None, map(section_of, get_args(annotation))), None)
    return None


def options_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section], str, FieldInfo]]:
    """(path, section, name, field) of every option; a list of sections is one, and so are its keys."""
    for name in sorted(
        section.model_fields, key=lambda name: name not in section.__annotations__
    ):  # its own first
        field = section.model_fields[name]
        below = section_of(field.annotation)
        is_list = below is not None and get_origin(field.annotation) is tuple
        others = [one for one in get_args(field.annotation) if one is not type(None) and section_of(one) is None]
        if below is None or is_list or others:
            yield prefix + name, section, name, field
        if below is not None:
            yield from options_of(below, f"{prefix}{name}{'[]' if is_list else ''}.")


def kind(schema: dict[str, Any]) -> str:
    """The kind of a value, in words."""
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        kinds = list(dict.fromkeys(kind(one) for one in schema["anyOf"]))
        return "bytes, as `64MiB`" if kinds == ["whole number > 0", "text"] else " or ".join(kinds)
    if "$ref" in schema or "additionalProperties" in schema:
        return "keys and values"
    names = {"integer": "whole number", "boolean": "`true` or `false`", "string": "text", "array": "list"}
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return " ".join([names.get(schema["type"], schema["type"]), ", ".join(bounds)]).strip()


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def options_page() -> str:
    parts: dict[str, list[str]] = {}
    for path, section, name, field in options_of(DeploymentConfig):
        schema = section.model_json_schema(mode="validation")["properties"][name]
        default = (
            ""
            if field.is_required()
            else f"`{json.dumps(field.get_default(call_default_factory=True), default=str)}`"
        )
        row = (f"`{path}`", kind(schema), default, field.description or "")
        part = path.partition(".")[0] if "." in path else "The file itself"
        parts.setdefault(part, []).append(f"| {' | '.join(map(cell, row))} |")
    lines = [OPTIONS]
    for part, rows in parts.items():
        lines += [f"## {part}", "", "| option | value | default | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(name, command) of each, groups of commands taken apart."""
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    for below in command.list_commands(None):
        yield from commands(command.get_command(None, below), f"{name} {below}")


def cli_page() -> str:
    lines = [CLI]
    for name, command in commands(typer.main.get_command(app), "epd-serve"):
        context = command.make_context(name, [], resilient_parsing=True)
        lines += [f"## `{name}`", "", " ".join((command.help or "").split()), ""]
        records = [record for one in command.params if (record := one.get_help_record(context)) is not None]
        if records:
            lines += ["| | |", "|---|---|"]
            lines += [f"| `{cell(flag)}` | {cell(' '.join(words.split()))} |" for flag, words in records]
            lines.append("")
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """The text of each generated file, by its path."""
    return {
        "docs/reference/options.md": options_page(),
        "docs/reference/cli.md": cli_page(),
        "docs/reference/models.md": models_page(),
        "deploy/schema.json": json.dumps(deployment_schema(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).write_text(text, encoding="utf-8")
