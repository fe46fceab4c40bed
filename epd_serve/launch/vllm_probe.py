"""The vLLM of an environment, found without importing it: that alone takes seconds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec

from epd_serve.launch import vllm_sources
from epd_serve.launch.vllm_hooks import Module, lacking, needed_modules

#: vLLM's with which epd-serve's connectors were run.
TESTED = ("0.32", "0.33")
#: What is older is refused.
OLDEST = (0, 20)
_KEYS = {"store": "vllm.features: store", "grouped": "vllm.kv: grouped", "rewritten": "vllm.media: rewritten"}
_TIMEOUT_S = 60.0


class NoVllm(ValueError):
    """An interpreter has no vLLM, or does not run here: one of another machine may."""


class VllmFound(msgspec.Struct, frozen=True):
    """An environment's vLLM; versions are "" for packages that are not there.

    Attributes:
        epd_serve: whether this package can be imported there.
        flags: of ``vllm serve``, with ``_``.
        modules: its modules that epd-serve's connectors need (:func:`epd_serve.launch.vllm_hooks.needed_modules`).
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
