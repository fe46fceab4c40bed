"""The vLLM of an environment, and the deployments it can run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epd_serve.launch.vllm import versions

#: The oldest vLLM with hooks for epd-serve's feature connector and with the flags of ``media_flags``.
STORE = (0, 32)
#: The oldest supported vLLM.
OLDEST = (0, 20)
_TIMEOUT_S = 60.0
_MOONCAKE_LIBRARIES = ", or one of its libraries (Debian: libibverbs1 librdmacm1 libnuma1 libcurl4)"


class NoVllm(ValueError):
    """The interpreter lacks vLLM or does not run on this machine; another machine's may be complete."""


class VllmFound(msgspec.Struct, frozen=True):
    """An environment's vLLM; the version of an absent package is "".

    Attributes:
        epd_serve: whether that environment can import this package.
        architectures: the models in its registry.
    """

    vllm: str
    vllm_ascend: str
    mooncake: bool
    nixl: bool
    epd_serve: bool
    python: str
    architectures: list[str] = msgspec.field(default_factory=list)

    @property
    def release(self) -> tuple[int, ...]:
        """As in (0, 32)."""
        return tuple(int(part) for part in self.vllm.split("+")[0].split(".")[:2] if part.isdecimal())

    def lists(self, content: Mapping[str, Any]) -> bool:
        """Return whether its registry lists an architecture of a ``config.json``."""
        return not set(self.architectures).isdisjoint(content.get("architectures") or ())


def find_vllm(python: str | Path) -> VllmFound:
    """Ask an interpreter for its packages. Raises NoVllm if it does not run or is not a Python."""
    try:
        answer = subprocess.run(
            [str(python), "-I", versions.__file__], capture_output=True, timeout=_TIMEOUT_S, check=True, text=True
        )
        return msgspec.json.decode(answer.stdout.rpartition("\n{")[2].strip() or answer.stdout, type=VllmFound)
    except msgspec.MsgspecError:
        raise NoVllm(f"vllm.python: {python} is not a Python; name the interpreter with vLLM") from None
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        raise NoVllm(f"vllm.python: {python} does not run: {output.strip()[-300:]}") from error


def check_found(found: VllmFound, *, python: str | Path, needs: Iterable[str] = ()) -> None:
    """Raise ValueError unless the vLLM found can run a deployment; NoVllm if it is missing.

    Args:
        needs: "store", the connector for encoder output, and packages: "mooncake", "nixl", "vllm_ascend".
    """
    if not found.vllm:
        raise NoVllm(
            f"engine: vllm, but {python} lacks vLLM; install it there (for CUDA, in epd-serve's clone: "
            "pip install '.[vllm]'; for CPUs and NPUs: docs/guide/vllm.md), "
            "or set vllm.python to an interpreter with vLLM"
        )
    if found.release < OLDEST:
        raise ValueError(f"vLLM {found.vllm} of {python} is too old; install {_text(OLDEST)} or newer there")
    for need in needs:
        if need == "store":
            if found.release < STORE:
                raise ValueError(
                    f"vLLM {found.vllm} of {python} cannot send encoder output from E to P; install "
                    f"{_text(STORE)} or newer there, or write a topology without a separate E"
                )
        elif not getattr(found, need):
            libraries = _MOONCAKE_LIBRARIES if need == "mooncake" else ""
            raise ValueError(
                f"{need.replace('_', '-')} is missing in {python}'s environment{libraries}; install it there"
            )
        elif need == "vllm_ascend":  # a release has the number of its vLLM
            release = ".".join(found.vllm.split("+")[0].split(".")[:3])
            theirs = re.match(r"\d+\.\d+\.\d+", found.vllm_ascend)
            if theirs is not None and release != theirs[0] and ".dev" not in found.vllm_ascend:
                raise ValueError(
                    f"vllm-ascend {found.vllm_ascend} of {python} is for vLLM {theirs[0]}, not {found.vllm}; "
                    "install a matching pair, as in vllm-ascend's container image"
                )


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def show_vllm(console: Console, python: Path | None) -> bool:
    """Print a table of the features of an interpreter's vLLM.

    Returns False if an interpreter is named and lacks a usable vLLM.
    """
    named = python or Path(sys.executable)
    table = Table("engine: vllm", "usable", "detail")
    rows: dict[str, str] = {}
    try:
        found = find_vllm(named)
        check_found(found, python=named)
        rows = {f"{named}, vLLM {found.vllm} {found.vllm_ascend}": "", **lacks(found)}
    except ValueError as error:
        rows = {str(named): str(error)}
    for part, lack in rows.items():
        table.add_row(part, Text("no", "yellow") if lack else Text("yes", "green"), Text(lack))
    console.print(table)
    return python is None or str(named) not in rows


def lacks(found: VllmFound) -> dict[str, str]:
    """Return the reason why each connector is unavailable, "" if it is available."""
    is_old = found.release < STORE and not found.vllm_ascend
    mooncake = f"the mooncake package is not installed there{_MOONCAKE_LIBRARIES}"
    return {
        "a separate E": f"needs vLLM {_text(STORE)} or newer" if is_old else "",
        "kv: mooncake": "" if found.mooncake else mooncake,
        "kv: nixl": "" if found.nixl else "the nixl package is not installed there",
    }
