"""The vLLM of an environment, and the deployments it can run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import msgspec

from epd_serve.launch.vllm import versions

#: The oldest vLLM with hooks for epd-serve's feature connector and with the flags of ``media_flags``.
STORE = (0, 32)
_OLDEST = (0, 20)
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


@cache
def find_vllm(python: str) -> VllmFound:
    """Ask an interpreter for its packages, once. Raises NoVllm if it does not run or is not a Python."""
    try:
        answer = subprocess.run(
            [python, "-I", versions.__file__], capture_output=True, timeout=_TIMEOUT_S, check=True, text=True
        )
        return msgspec.json.decode(answer.stdout.rpartition("\n{")[2].strip() or answer.stdout, type=VllmFound)
    except msgspec.MsgspecError:
        raise NoVllm(f"vllm.python: {python} is not a Python; name the interpreter with vLLM") from None
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        raise NoVllm(f"vllm.python: {python} does not run: {output.strip()[-300:]}") from error


def check_found(found: VllmFound, *, python: str, needs: Collection[str] = ()) -> None:
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
    its_vllm = f"vLLM {found.vllm} of {python}"
    if found.release < _OLDEST:
        raise ValueError(f"{its_vllm} is too old; install {_text(_OLDEST)} or newer there")
    if "store" in needs and found.release < STORE:
        raise ValueError(
            f"{its_vllm} cannot send encoder output from E to P; install {_text(STORE)} or newer there, or write "
            "a topology without a separate E"
        )
    for package in ("mooncake", "nixl", "vllm_ascend"):
        if package in needs and not getattr(found, package):
            libraries = _MOONCAKE_LIBRARIES if package == "mooncake" else ""
            name = package.replace("_", "-")
            raise ValueError(f"{name} is missing in {python}'s environment{libraries}; install it there")
    # a release has the number of its vLLM
    theirs = re.match(r"\d+\.\d+\.\d+", found.vllm_ascend)
    is_release = "vllm_ascend" in needs and theirs is not None and ".dev" not in found.vllm_ascend
    if theirs is not None and is_release and not re.match(rf"{re.escape(theirs[0])}(?!\d)", found.vllm):
        raise ValueError(
            f"vllm-ascend {found.vllm_ascend} of {python} is for vLLM {theirs[0]}, not {found.vllm}; "
            "install a matching pair, as in vllm-ascend's container image"
        )


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
