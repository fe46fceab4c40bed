"""The transfer experiments of EPD-Serve on this machine: ``python -m benchmarks.transfer [table4|...|all]``."""

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

EXPERIMENTS: dict[str, Callable[[Path, int], Awaitable[dict[str, Any]]]] = {
    "table2": lambda directory, _: transfer_ttft.table2(transfer_ttft.model(directory)),
    "table3": lambda directory, _: transfer_features.table3(transfer_features.model(directory)),
    "table4": lambda directory, repeats: transfer_kv.table4(transfer_kv.model(directory), repeats),
}


async def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("experiment", nargs="?", default="all", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--repeats", type=int, default=3, help="of table4; medians are taken")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    RESULTS.mkdir(exist_ok=True)
    for name, run in EXPERIMENTS.items():
        if arguments.experiment not in (name, "all"):
            continue
        print(f"{name} on {machine()}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="epd-serve-") as directory:
            data = await run(Path(directory), arguments.repeats)
        data = {
            "command": f"python -m benchmarks.transfer {name} --repeats {arguments.repeats}",
            "machine": machine(),
            "took_s": round(time.monotonic() - start),
            **data,
        }
        write(RESULTS / f"transfer-{name}.json", data)
        Console(width=130).print(transfer_reports.TABLES[name](data))


if __name__ == "__main__":
    asyncio.run(main())
