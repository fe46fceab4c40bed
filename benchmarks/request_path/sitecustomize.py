"""A profile hook for every Python process of a deployment: which functions of ours one request enters, and when.

Python imports this module at start where its folder is on ``PYTHONPATH``. SIGUSR2 begins the recording, a
second one writes it to ``$REQUEST_PATH_DIRECTORY/<pid>.json`` as rows of (monotonic nanoseconds, thread, file,
first line, function), the first entry of each function in each thread.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType

_PACKAGES = ("epd_serve", "proxy", "device")
_entries: dict[tuple[int, CodeType], int] = {}
_recording = False


def _hook(frame, event, _argument):
    if _recording and event == "call":
        _entries.setdefault((threading.get_ident(), frame.f_code), time.monotonic_ns())


def _toggle(_signal, _frame):
    global _recording
    _recording = not _recording
    if _recording:
        _entries.clear()
        return
    root = Path(os.environ["REQUEST_PATH_ROOT"])
    rows = []
    for (thread, code), when in list(_entries.items()):
        file = Path(code.co_filename)
        if file.is_relative_to(root) and file.relative_to(root).parts[0] in _PACKAGES:
            rows.append((when, thread, str(file.relative_to(root)), code.co_firstlineno, code.co_qualname))
    directory = Path(os.environ["REQUEST_PATH_DIRECTORY"])
    part = directory / f"{os.getpid()}.part"
    part.write_text(json.dumps(rows))
    part.rename(directory / f"{os.getpid()}.json")


if "REQUEST_PATH_DIRECTORY" in os.environ:
    signal.signal(signal.SIGUSR2, _toggle)
    threading.setprofile(_hook)
    sys.setprofile(_hook)
