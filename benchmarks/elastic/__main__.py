"""EPD's table 6: with and without role switches where answers get ten times longer behind the first tenth.

    python -m benchmarks.elastic simulated [--requests 200] [--rate 3]

It writes its figures and the roles over time to ``benchmarks/results/elastic-*``. ``simulated``: 8 instances of
the simulator, driven by the controller that runs live.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.elastic.plots import DRAINING, REBUILDING, roles_over_time, write_png

RESULTS = Path(__file__).parents[1] / "results"


def simulated(count: int, rate: float) -> dict[str, Any]:
    from benchmarks.elastic.simulated import table_6

    found, spans, end_s = table_6(count, rate, seeds=(0, 1, 2))
    shorter, _, _ = table_6(count // 2, rate, seeds=(0, 1, 2))
    names = {"SERVING": "", "DRAINING": DRAINING, "REBUILDING": REBUILDING}
    row = found["rows"][0]
    drawing = roles_over_time(
        [
            (one.instance, names[one.state] or str(one.role), one.from_s, one.until_s or end_s)
            for one in spans
            if (one.until_s or end_s) > one.from_s
        ],
        f"Roles over time, from {found['start']} to {row['end']}: simulated",
        f"{count} requests, {rate:g}/s; latency {row['ratio']['latency_s']:.1f} times and TPOT "
        f"{row['ratio']['tpot_s']:.1f} times lower than without switches",
        [(count / 10 / rate, "answers get 10 times longer"), (count / rate, "last arrival")],
    )
    write_png(RESULTS / "elastic-simulated.png", drawing)
    return {"long": found, "half_as_long": shorter}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulated"])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    wanted = parser.parse_args()
    found = simulated(wanted.requests, wanted.rate)
    text = json.dumps(found, indent=1)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"elastic-{wanted.what}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
