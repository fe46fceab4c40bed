"""``epd-serve verify`` against servers with planted faults.

python -m benchmarks.verify planted
"""

from __future__ import annotations

import sys

from benchmarks.common import RESULTS, machine, typed, write
from benchmarks.verify.planted import table


def main() -> int:
    found = table()
    heading = {"command": typed("verify"), "machine": machine()}
    write(RESULTS / "verify-planted.json", {**heading, "faults": found})
    missed = [fault for fault, one in found.items() if fault and one["planted_for"] not in one["found_by"]]
    print(f"{len(found) - 1} faults; missed by their checks: {missed}; false alarms: {found['']['found_by']}")
    return int(bool(missed or found[""]["found_by"]))


if __name__ == "__main__":
    sys.exit(main())
