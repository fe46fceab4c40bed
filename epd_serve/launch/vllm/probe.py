"""The vLLM of an environment and whether it suits epd-serve, found without importing it: that takes seconds."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

import epd_serve
from epd_serve.launch.vllm import sources as vllm_sources
from epd_serve.launch.vllm.sources import read_module

#: vLLM's with which epd-serve's connectors were run.
TESTED = ("0.32", "0.33")
#: On which a development version of vllm-ascend (August 2026) imports.
ASCEND_HEAD = ("0.27.1", "0.28.0")
#: What is older is refused.
OLDEST = (0, 20)
_KEYS = {"store": "vllm.features: store", "grouped": "vllm.kv: grouped"}
_TIMEOUT_S = 60.0


class NoVllm(ValueError):
    """An interpreter has no vLLM, or does not run here: one of another machine may."""


class VllmFound(msgspec.Struct, frozen=True):
    """An environment's vLLM; versions are "" for packages that are not there.

    Attributes:
        epd_serve: whether this package can be imported there.
        flags: of ``vllm serve``, with ``_``.
        modules: its modules that epd-serve's connectors need (:func:`needed_modules`).
    """

    vllm: str
    vllm_ascend: str
    mooncake: bool
    nixl: bool
    epd_serve: bool
    python: str
    flags: list[str]
    modules: dict[str, Module | None] = msgspec.field(default_factory=dict)

    def lacks(self, connector: str) -> str:
        """The part that it lacks for one of epd-serve's connectors; "" for none."""
        return lacking(connector, self.modules)


def probe_vllm(python: str | Path) -> VllmFound:
    """Ask an interpreter. Raises NoVllm where it does not run."""
    try:
        answer = subprocess.run(
            [str(python), "-I", vllm_sources.__file__, json.dumps(needed_modules())],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
            text=True,
        )
        return msgspec.convert(json.loads(answer.stdout.splitlines()[-1]), VllmFound)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise NoVllm(f"vllm.python: {python} cannot be asked for its vLLM: {said.strip()[-300:]}") from error


def check_found(
    found: VllmFound, *, python: str | Path, connectors: Iterable[str] = (), needs: Iterable[str] = ()
) -> None:
    """Raise ValueError unless a deployment can run on the vLLM that was found; NoVllm where there is none.

    Args:
        connectors: those of epd-serve's that it uses.
        needs: packages besides: "mooncake", "nixl", "vllm_ascend".
    """
    if not found.vllm:
        raise NoVllm(
            f"engine: vllm, but {python} has no vLLM; install it there (for CUDA, in epd-serve's clone: "
            "pip install '.[vllm]'; for CPUs and NPUs: docs/guide/vllm.md), "
            "or set vllm.python to the interpreter that has it"
        )
    release = found.vllm.split("+")[0]
    if tuple(int(part) for part in release.split(".")[:2] if part.isdecimal()) < OLDEST:
        raise ValueError(f"vLLM {found.vllm} is too old; {'.'.join(map(str, OLDEST))} or newer is needed")
    for connector in connectors:
        if lack := found.lacks(connector):
            raise ValueError(
                f"{_KEYS[connector]} does not fit vLLM {found.vllm} of {python}: {lack}. It was run with "
                f"{' and '.join(TESTED)}; install one of these, or write features: file and kv: mooncake or nixl"
            )
    if "vllm_ascend" in needs:
        check_pair(found, python=python)
    for package in needs:
        if not getattr(found, package):
            raise ValueError(f"{package.replace('_', '-')} is missing in {python}'s environment; install it there")


def check_pair(found: VllmFound, *, python: str | Path) -> None:
    """Raise ValueError where vllm-ascend is one for another vLLM.

    Its releases have the number of the vLLM that they are for (versioning_policy.md there); development versions
    say nothing, and the one that was read imports on two (182b75ea).
    """
    release = ".".join(found.vllm.split("+")[0].split(".")[:3])
    theirs = re.match(r"\d+\.\d+\.\d+", found.vllm_ascend)
    if theirs is None or release == theirs[0]:
        return
    if ".dev" in found.vllm_ascend and release in ASCEND_HEAD:
        return
    fits = " or ".join(ASCEND_HEAD) if ".dev" in found.vllm_ascend else theirs[0]
    raise ValueError(
        f"vllm-ascend {found.vllm_ascend} of {python} is for vLLM {fits}, and vLLM {found.vllm} is there; "
        "install the pair that belongs together, as in vllm-ascend's container image"
    )


def check_flags(found: VllmFound, arguments: Iterable[str]) -> None:
    """Raise ValueError for a flag that this vLLM does not have."""
    if unknown := sorted(set(arguments) - set(found.flags)):
        import difflib

        alike = difflib.get_close_matches(unknown[0], found.flags, n=1)
        hint = f"; did you mean {alike[0]}?" if alike else ""
        raise ValueError(f"engine_args: vLLM {found.vllm} has no flag {unknown[0]}{hint}")


_PLUGIN = Path(epd_serve.__file__).parent / "vllm_plugin"
#: Connectors by the word that stands for them in a deployment file: the file and class of each, the vLLM class at
#: its root, and words that must occur in modules of vLLM which it does not import.
_CONNECTORS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "store": ("features", "StoreFeatureConnector", "ECConnectorBase", {"vllm.v1.request": "ec_transfer_params"}),
    "grouped": ("kv", "GroupedKVConnector", "KVConnectorBase_V1", {"vllm.v1.request": "kv_transfer_params"}),
}
CONNECTORS = tuple(_CONNECTORS)
#: Methods that are no hooks of vLLM's, or none of an earlier one's.
_OWN = {"supports_sleep_mode"}


class Module(msgspec.Struct, frozen=True):
    """A module of vLLM as :func:`epd_serve.launch.vllm.sources.read_module` describes it."""

    words: list[str]
    names: list[str]
    classes: dict[str, dict[str, tuple[list[str], bool]]]
    bases: dict[str, list[str]] = msgspec.field(default_factory=dict)


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
    """The methods of a connector and of its heirs."""
    own = _own(file)
    heirs = [name, *(one for one, bases in own.bases.items() if name in bases)]
    return {method: told for one in heirs for method, told in own.classes[one].items()}


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


def check_vllm_engine(console: Console, python: Path | None) -> bool:
    """Print a table of what an interpreter's vLLM can run.

    Returns False where an interpreter is named and has no vLLM that can run.
    """
    named = python or Path(sys.executable)
    table = Table("engine: vllm", "can it run", "detail")
    try:
        found = probe_vllm(named)
        check_found(found, python=named)
    except ValueError as error:
        table.add_row(str(named), Text("no", "bold red" if python else "dim"), Text(str(error)))
        console.print(table)
        return python is None
    name = f"vLLM {found.vllm}" + (f", vllm-ascend {found.vllm_ascend}" if found.vllm_ascend else "")
    table.add_row(str(named), Text("yes", "green"), f"{name}, Python {found.python}")
    for connector, missing in connectors_of(found).items():
        table.add_row(connector, Text("no", "yellow") if missing else Text("yes", "green"), missing)
    console.print(table)
    return True


def connectors_of(found: VllmFound) -> dict[str, str]:
    """Each connector of the deployment file, and what that vLLM lacks for it; "" for nothing."""
    return {
        "features: store": found.lacks("store"),
        "features: file": "",
        "kv: grouped": found.lacks("grouped"),
        "kv: mooncake": "" if found.mooncake else "the mooncake package is not installed there",
        "kv: nixl": "" if found.nixl else "the nixl package is not installed there",
    }
