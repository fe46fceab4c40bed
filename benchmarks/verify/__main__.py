"""``epd-serve verify`` against servers with planted faults, the demo deployment, and the field.

python -m benchmarks.verify planted
python -m benchmarks.verify repeated [--runs 10]
python -m benchmarks.verify field --vllm-python PYTHON [--proxy disagg_epd_proxy.py] [--router vllm-router]
python -m benchmarks.verify tables        prints the tables of faults and of the field as Markdown
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.common import RESULTS, argument_parser, machine, typed, write
from benchmarks.verify.field import SERVERS, Peers, run
from benchmarks.verify.planted import table
from benchmarks.verify.repeated import repeat
from benchmarks.verify.tables import field_table, planted_table


def planted() -> int:
    found = table()
    heading = {"command": typed("verify"), "machine": machine()}
    write(RESULTS / "verify-planted.json", {**heading, "faults": found})
    missed = [fault for fault, one in found.items() if fault and one["planted_for"] not in one["found_by"]]
    print(f"{len(found) - 1} faults; missed by their checks: {missed}; false alarms: {found['']['found_by']}")
    return int(bool(missed or found[""]["found_by"]))


def repeated(runs: int) -> int:
    found = repeat(runs)
    write(RESULTS / "verify-demo.json", {"command": typed("verify"), "machine": machine(), "runs": found})
    failed = sorted({check for one in found for check, result in one.items() if result["outcome"] == "fail"})
    seconds = [round(sum(result["seconds"] for result in one.values())) for one in found]
    print(f"{runs} runs of {seconds} s; failed: {failed}")
    return int(bool(failed))


def field(arguments: argparse.Namespace) -> int:
    peers = Peers(
        python=arguments.vllm_python,
        proxy=arguments.proxy,
        router=arguments.router,
        sglang_router=arguments.sglang_router,
    )
    return run(arguments.only or list(SERVERS), arguments.suite or (), peers, arguments.slowness)


def main() -> int:
    parser = argument_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("planted")
    commands.add_parser("tables")
    commands.add_parser("repeated").add_argument("--runs", type=int, default=10)
    options = commands.add_parser("field")
    options.add_argument("--vllm-python", required=True, help="of an environment that has vLLM")
    options.add_argument("--proxy", type=Path, help="vLLM's examples/.../disagg_epd_proxy.py")
    options.add_argument("--router", help="the program vllm-router")
    options.add_argument("--sglang-router", help="the program sglang-router")
    options.add_argument("--only", action="append", choices=list(SERVERS))
    options.add_argument("--suite", action="append")
    options.add_argument("--slowness", type=float, default=4.0)
    arguments = parser.parse_args()
    if arguments.command == "tables":
        print(*planted_table(), "", *field_table(), sep="\n")
        return 0
    if arguments.command == "repeated":
        return repeated(arguments.runs)
    return planted() if arguments.command == "planted" else field(arguments)


if __name__ == "__main__":
    sys.exit(main())
