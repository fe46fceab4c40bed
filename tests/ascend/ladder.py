"""The checks of the Ascend backend on a machine without an NPU, and how far they go.

    python tests/ascend/ladder.py [--wheel torch_npu-....whl] [--update-lock]

Five levels, each named by what it proves:

* **schema**: the *real* torch_npu wheel is loaded. The operators and the Python API that the backend calls exist
  there with the arguments that it passes; the operators' schemas are those in ``schema_lock.json``. Of an older
  wheel, which vllm-ascend pins and which needs an older torch, the schemas are read from the library's text.
* **shape**: the backend's calls in steps of a model of 8B parameters, on fake tensors of ``npu:0``: types and
  shapes pass the wheel's own Meta kernels, and a recorder checks each call against the documented constraints.
* **semantics**: with CPU kernels of our own under the wheel's schemas the backend computes on CPU tensors: equal
  to the reference operators, and the tiny models give the tokens of the plain-torch path. Captured decode steps go
  through torch_npu's own capture bookkeeping, on an emulated device.
* **host**: the device layer runs through the wheel's own C++ code over a runtime of host memory, whose streams,
  events and copies are asynchronous and keep order, and whose contexts belong to threads (``host_runtime.c``).
* **hw**: needs an NPU and an installed torch_npu, where plain ``pytest tests/ascend`` runs all levels. Elsewhere
  it is skipped.

Accuracy, speed, memory, ordering and overlap on a real NPU are beyond the first four.

The wheel for the installed torch (or ``--wheel``) is downloaded once to ``~/.cache/epd-serve`` and unpacked into a
temporary folder on PYTHONPATH of the tests' process: installed, it would load itself with every ``import torch``.
CANN's libraries are replaced by generated ones (``stub_libraries.py``; needs gcc and nm: Debian's gcc and
libc6-dev). ``--update-lock`` writes ``schema_lock.json`` anew from the wheel; other arguments go to pytest.
"""

from __future__ import annotations

import argparse
import compileall
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import stub_libraries

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_OLDER = "2.10.0.post4"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "epd-serve"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="torch_npu wheel; without it, the one of the installed torch")
    parser.add_argument("--update-lock", action="store_true", help="write schema_lock.json from the wheel")
    options, pytest_arguments = parser.parse_known_args()
    wheel = options.wheel or _download(version("torch").partition("+")[0])
    with tempfile.TemporaryDirectory() as folder:
        site, stubs = Path(folder, "site"), Path(folder, "stubs")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        with zipfile.ZipFile(_download(_OLDER)) as archive:
            older = archive.extract("torch_npu/lib/libtorch_npu.so", Path(folder, "older"))
        symbols = stub_libraries.build(site / "torch_npu", stubs)
        print(f"{wheel.name} over {symbols} stub symbols", flush=True)
        compileall.compile_dir(site, quiet=2)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(stubs), os.environ.get("LD_LIBRARY_PATH")))),
            # torch would import torch_npu by its entry point, before the tests can silence its warnings.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            # Operators of the graph engine are set up at their first use, and none is used.
            "ACL_OP_INIT_MODE": "1",
            "EPD_ASCEND_STUBS": "1",
            # The emulated graph records calls through torch's dispatcher; our C++ operators bypass it.
            "EPD_SERVE_CPU_KERNELS": "0",
            "EPD_OLDER_TORCH_NPU": older,
        }
        if options.update_lock:
            environment["EPD_UPDATE_SCHEMA_LOCK"] = "1"
        command = [sys.executable, "-m", "pytest", "tests/ascend", "-p", "no:cacheprovider", *pytest_arguments]
        return subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode


def _download(npu_version: str) -> Path:
    """The wheel for this Python, from the cache where it is there."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"torch_npu-{npu_version}*-{tag}-*.whl"
    if not any(_CACHE.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(_CACHE)]
        subprocess.run([*command, f"torch_npu=={npu_version}"], check=True)
    return next(_CACHE.glob(pattern))


if __name__ == "__main__":
    sys.exit(main())
