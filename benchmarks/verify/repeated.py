"""Every check against the demo deployment, again and again: a right server gives no alarm."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.verify.field import kept, up, verified


def repeat(runs: int) -> list[dict[str, Any]]:
    """The results of each run, on one deployment."""
    scratch, found = Path(tempfile.mkdtemp(prefix="epd-serve-repeated-")), []
    with up(ROOT / "deploy" / "cpu-e-p-d.yaml", scratch) as server:
        for number in range(runs):
            print(f"== run {number + 1}", flush=True)
            found.append(kept(asyncio.run(verified(server, None, (), scratch / str(number), 1.0))))
    return found
