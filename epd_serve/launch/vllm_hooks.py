"""The parts of a vLLM that epd-serve's connectors need, looked up in the sources of both: nothing is imported.

A version number would refuse each new vLLM, and let one pass whose files are others.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

import epd_serve
from epd_serve.launch.vllm_sources import read_module

_PLUGIN = Path(epd_serve.__file__).parent / "vllm_plugin"
#: Connectors by the word that stands for them in a deployment file: the file and class of each, the vLLM class at
#: its root, and words that must occur in modules of vLLM which it does not import.
_CONNECTORS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "store": ("features", "StoreFeatureConnector", "ECConnectorBase", {"vllm.v1.request": "ec_transfer_params"}),
    "rewritten": ("rewritten", "RewrittenMediaConnector", "ECConnectorBase", {}),
    "grouped": ("kv", "GroupedKVConnector", "KVConnectorBase_V1", {"vllm.v1.request": "kv_transfer_params"}),
}
CONNECTORS = tuple(_CONNECTORS)
#: Methods that are no hooks of vLLM's, or none of an earlier one's.
_OWN = {"take_counts", "supports_sleep_mode"}


class Module(msgspec.Struct, frozen=True):
    """A module of vLLM as :func:`epd_serve.launch.vllm_sources.read_module` describes it."""

    words: list[str]
    names: list[str]
    classes: dict[str, dict[str, tuple[list[str], bool]]]


@cache
def needed_modules() -> dict[str, list[str]]:
    """Modules of vLLM, each with the words to look for in it."""
    found: dict[str, list[str]] = {}
    for file, _, _, words in _CONNECTORS.values():
        for module, _ in _imports(file):
            found.setdefault(module, [])
        for module, word in words.items():
            found.setdefault(module, []).append(word)
    return found


def lacking(connector: str, modules: Mapping[str, Module | None]) -> str:
    """The part that a vLLM lacks for one of :data:`CONNECTORS`; "" for none.

    ``modules`` are the needed ones, None for those that the vLLM does not have.
    """
    file, name, root, words = _CONNECTORS[connector]
    theirs: dict[str, tuple[list[str], bool]] = {}
    for module, imported in _imports(file):
        there = modules.get(module)
        if there is None:
            return f"it has no {module}"
        if imported not in there.names:
            return f"{module} has no {imported}"
        theirs |= there.classes.get(root, {})
    for module, word in words.items():
        there = modules.get(module)
        if there is None or word not in there.words:
            return f"{module} knows no {word}"
    ours = _methods(file, name)
    for method, (arguments, _) in ours.items():
        if method.startswith("_") or method in _OWN:
            continue
        if method not in theirs:
            return f"{root} has no {method}"
        if theirs[method][0] != arguments:
            return f"{root}.{method} takes {', '.join(theirs[method][0])}, and not {', '.join(arguments)}"
    for method, (_, is_abstract) in theirs.items():
        if is_abstract and method not in ours:
            return f"{root} asks for {method}"
    return ""


@cache
def _own(file: str) -> Module:
    return msgspec.convert(read_module(_PLUGIN / f"{file}.py", []), Module)


def _methods(file: str, name: str) -> dict[str, tuple[list[str], bool]]:
    """The methods of a connector, with those that it has from another class of the plugin."""
    inherited = {} if file == "kv" else _own("feature_figures").classes["CountingConnector"]
    return inherited | _own(file).classes[name]


@cache
def _imports(file: str) -> list[tuple[str, str]]:
    """(module, name) of what a file of the plugin, and the files of the plugin that it imports, have from vLLM."""
    found: list[tuple[str, str]] = []
    for node in ast.parse((_PLUGIN / f"{file}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("vllm."):
                found += [(node.module, one.name) for one in node.names]
            elif node.module.startswith(f"{_PLUGIN.parent.name}.{_PLUGIN.name}."):
                found += _imports(node.module.rpartition(".")[2])
    return found
