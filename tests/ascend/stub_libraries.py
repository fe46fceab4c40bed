"""Shared libraries with which a real torch_npu wheel loads on a machine without CANN and without an NPU.

They hold the names that torch_npu's libraries import and nobody on the machine exports. Functions report an error,
except for the runtime's part that ``host_runtime.c`` fills: devices, memory, streams, events and copies.
Names come from ``nm`` at run time: nothing of the vendor's is kept.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from pathlib import Path

_LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
_ATB = "libatb.so"
_ERROR = 507000  # ACL_ERROR_RT_INTERNAL_ERROR
_RETURN_NULL = ("aclCreateDataBuffer", "aclCreateTensorDesc", "aclopCreateAttr", "aclGetRecentErrMsg")
_HARMLESS = ("Msprof", "aclAppLog")
_RUNTIME = Path(__file__).parent / "host_runtime.c"


def build(package: Path, target: Path) -> int:
    """Write the libraries that the unpacked package ``torch_npu`` needs; returns how many symbols they export."""
    target.mkdir(parents=True, exist_ok=True)
    atb_plugin = package / "lib" / "libop_plugin_atb.so"
    own = [path for path in (package / "lib").glob("*.so") if path != atb_plugin] + [*package.glob("_C*.so")]
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None, "torch is installed"
    provided = {
        name for path in (*own, *(Path(torch.origin).parent / "lib").glob("*.so*")) for name in _exports(path)
    }
    symbols = sorted(
        name
        for name in set().union(*map(_imports, own)) - provided
        if not name.startswith("_Z") and not _is_loaded(name)
    )
    runtime = target / _LIBRARIES[0]
    _compile(runtime, "\n".join(_function(name) for name in symbols), _RUNTIME)
    # Whoever looks a function up in one of these is given the runtime's.
    for library in _LIBRARIES[1:]:
        _compile(target / library, "", "-x", "none", "-Wl,--no-as-needed", runtime)
    mangled = (
        sorted(name for name in _imports(atb_plugin) if name.startswith("_ZN3atb")) if atb_plugin.exists() else []
    )
    # C has no name for a mangled symbol, but an assembler label sets any.
    _compile(
        target / _ATB,
        "\n".join(
            f'int atb_{i}(void) __asm__("{name}"); int atb_{i}(void) {{ return -1; }}'
            for i, name in enumerate(mangled)
        ),
    )
    return len(symbols) + len(mangled)


def _imports(library: Path) -> set[str]:
    """Undefined symbols that are not weak."""
    return {row[-1].split("@")[0] for row in _symbols(library, "--undefined-only") if row[-2] not in "wv"}


def _exports(library: Path) -> set[str]:
    return {row[-1].split("@")[0] for row in _symbols(library, "--defined-only")}


def _symbols(library: Path, which: str) -> list[list[str]]:
    listing = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True)
    return [line.split() for line in listing.stdout.splitlines()]


def _is_loaded(symbol: str) -> bool:
    """Whether Python's process or the C and C++ runtimes export it."""
    libraries: list[str | None] = [None, "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1"]
    return any(hasattr(ctypes.CDLL(library), symbol) for library in libraries)


def _function(name: str) -> str:
    """Weak: a function of the runtime's comes before it."""
    if name in _RETURN_NULL:
        return f"__attribute__((weak)) void *{name}(void) {{ return 0; }}"
    result = 0 if name.startswith(_HARMLESS) else _ERROR
    return f"__attribute__((weak)) long {name}(void) {{ return {result}; }}"


def _compile(library: Path, source: str, *inputs: str | Path) -> None:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", *inputs, "-o", library, f"-Wl,-soname,{library.name}"],
        input=source,
        text=True,
        check=True,
    )
