"""The transfer experiments of EPD-Serve on this machine: ``python -m benchmarks.transfer [table4|...|all]``.

``--tiny``: the least load of each, to see that it runs; its figures mean nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console

from benchmarks import transfer_features, transfer_kv, transfer_reports, transfer_ttft
from benchmarks.common import RESULTS, argument_parser, machine, write

Experiment = Callable[..., Awaitable[dict[str, Any]]]
EXPERIMENTS: dict[str, tuple[Experiment, Callable[[Path], Path]]] = {
    "table2": (transfer_ttft.table2, transfer_ttft.model),
    "table3": (transfer_features.table3, transfer_features.model),
    "table4": (transfer_kv.table4, transfer_kv.model),
}


async def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("experiment", nargs="?", default="all", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the results' directory")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    for name, (run, model) in EXPERIMENTS.items():
        if arguments.experiment not in (name, "all"):
            continue
        print(f"{name} on {machine()}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="epd-serve-") as directory:
            data = await run(model(Path(directory)), tiny=arguments.tiny)
        data = {
            "command": f"python -m benchmarks.transfer {name}",
            "machine": machine(),
            "took_s": round(time.monotonic() - start),
            **data,
        }
        write(arguments.output / f"transfer-{name}.json", data)
        Console(width=130).print(transfer_reports.TABLES[name](data))


if __name__ == "__main__":
    asyncio.run(main())
