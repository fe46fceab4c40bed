"""vllm-ascend's own code on a machine without an NPU: the pair vllm-ascend 0.23.0 and vLLM 0.23.0.

``sh tests/vllm_ascend/install.sh DIRECTORY`` makes its environment; EPD_SERVE_VLLM_ASCEND_PYTHON names its Python.
Without it these tests are skipped. CANN's libraries are generated (``tests/ascend/stub_libraries.py``; needs gcc
and nm); CANN's Python module ``acl`` and Mooncake are stand-ins, which are written here. Nothing of the vendor is
kept. The tests show calls, shapes, hooks and their order in the vendor's Python; no numerics of an NPU, no speed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_SCRIPTS = _ROOT / "tests" / "vllm_ascend"
_TIMEOUT_S = 600
_STAND_INS = {
    "acl/__init__.py": "",
    "acl/rt.py": "def memcpy(*arguments):\n    raise AssertionError('not asked for without sleep mode')\n",
    "mooncake/__init__.py": "",
    "mooncake/engine.py": (
        "class TransferEngine:\n"
        "    regions = []\n"
        "    def initialize(self, *arguments): return 0\n"
        "    def get_rpc_port(self): return 1\n"
        "    def register_memory(self, address, size): return self.regions.append((address, size)) or 0\n"
        "    def batch_register_memory(self, *regions): return self.regions.extend(zip(*regions)) or 0\n"
    ),
}

#: Runs a script of this folder in vllm-ascend's environment: its name, its standard input; gives its answer.
Vendor = Callable[[str, Any], Any]


def install(python: str, folder: Path) -> Vendor:
    """Generate what the vendor's code needs besides its Python, into a folder."""
    site, stubs = folder / "site", folder / "stubs"
    for name, text in _STAND_INS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (site, _ROOT, _ROOT / "tests/support", _ROOT / "tests/ascend"))),
    }
    script = (
        "import importlib.util as u, pathlib, stub_libraries as s; "
        f"s.build(pathlib.Path(u.find_spec('torch_npu').origin).parent, pathlib.Path({str(stubs)!r}))"
    )
    subprocess.run([python, "-c", script], env=environment, check=True, timeout=_TIMEOUT_S)
    environment |= {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "LD_LIBRARY_PATH": str(stubs),
        "TASK_QUEUE_ENABLE": "0",  # operators are launched by the thread that calls them
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",  # of virtual memory there is none
        "OMP_NUM_THREADS": "1",
    }

    def run(script: str, given: Any) -> Any:
        process = subprocess.run(
            [python, str(_SCRIPTS / script)],
            input=json.dumps(given),
            env=environment,
            text=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
        return json.loads(process.stdout.splitlines()[-1])

    return run
