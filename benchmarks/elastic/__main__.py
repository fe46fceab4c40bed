"""EPD's table 6: with and without role switches where answers get ten times longer behind the first tenth.

    python -m benchmarks.elastic simulated [--requests 200] [--rate 3]
    python -m benchmarks.elastic emulated [--seconds 360] [--seed 1] [--output FILE]

It writes its figures to ``benchmarks/results/elastic-*``. ``simulated``: 8 instances of
the simulator, driven by the controller that runs live; also with half the requests, and with the opposite load
(images behind long answers). ``emulated``: 8 emulated devices under an hour of a trace whose mix changes
twice (text-heavy, image-heavy, long answers), ten times as fast; requests that were lost and answers that differ
are counted, and make the command fail.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.common import RESULTS, argument_parser, write

SIMULATED_SEEDS = 8


def simulated(count: int, rate: float) -> None:
    from benchmarks.elastic.simulated import DECODERS, PAPERS_END, START, opposite, requests, table

    seeds, half = range(SIMULATED_SEEDS), count // 2
    found = {
        name: {"requests": num, "rate": rate, "start": start, "rows": table(start, end, made)}
        for name, num, start, end, made in (
            ("long", count, START, PAPERS_END, {seed: requests(count, rate, seed=seed) for seed in seeds}),
            ("half_as_long", half, START, PAPERS_END, {seed: requests(half, rate, seed=seed) for seed in seeds}),
            ("opposite", count, DECODERS, "3E-P-4D", {seed: opposite(count, rate, seed=seed) for seed in seeds}),
        )
    }
    print(write(RESULTS / "elastic-simulated.json", found))


def emulated(seconds: float, seed: int, output: Path) -> None:
    from benchmarks.elastic.emulated import measure

    row = measure(seconds, seed)
    print(write(output, row))
    num_lost = row["with"]["lost"] + row["without"]["lost"]
    if num_lost or row["wrong"]:
        sys.exit(f"{num_lost} requests were lost, {row['wrong']} answers are wrong")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("what", choices=["simulated", "emulated"])
    parser.add_argument("--requests", type=int, default=200, help="simulated")
    parser.add_argument("--rate", type=float, default=3.0, help="simulated: requests a second")
    parser.add_argument("--seed", type=int, default=1, help="emulated")
    parser.add_argument("--seconds", type=float, default=360.0, help="emulated: of the compressed trace")
    parser.add_argument("--output", type=Path, default=RESULTS / "elastic-emulated.json", help="emulated")
    wanted = parser.parse_args()
    if wanted.what == "emulated":
        emulated(wanted.seconds, wanted.seed, wanted.output)
    else:
        simulated(wanted.requests, wanted.rate)


if __name__ == "__main__":
    main()
