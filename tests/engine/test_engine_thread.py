"""The benchmark of the engine's thread in small."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import engine_thread


def test_steps_are_those_of_all_sequences(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    argv = ["--sequences", "3", "--contexts", "20", "9000", "--steps", "40", "--output", str(output)]
    engine_thread.main(argv)
    cells = json.loads(output.read_text())["cells"]
    assert [(one["sequences"], one["context"]) for one in cells] == [(3, 20), (3, 9000)]
    assert all(0 < one["cpu_ms_per_step"] < 1000 for one in cells)
