"""Asks OSV (https://osv.dev) for known vulnerabilities of what the locks and constraints.txt hold.

    python requirements/audit.py [pip-audit's options, as --ignore-vuln ID]

Ends with 1 where there is one. Where the data cannot be reached it says so, and ends with 0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lock import LOCKS, ROOT, packages

_PIP_AUDIT = ("--disable-pip", "--no-deps", "--vulnerability-service", "osv", "--format", "json")
#: The end of what pip-audit says when its source of data fails it.
_UNREACHABLE = re.compile(
    r"^(requests\.exceptions\.|pip_audit\._service\.)|could not (connect|reach)", re.IGNORECASE
)
_LIMIT_S = 600


def main() -> None:
    pins = {f"{package.name}=={package.version}" for name in LOCKS for package in packages(name)}
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pins |= {f"{re.sub('[-_.]+', '-', name).lower()}=={version}" for name, version in pinned}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pins.txt")
        path.write_text("\n".join(sorted(pins)))
        command = [
            sys.executable,
            "-m",
            "pip_audit",
            "--requirement",
            str(path),
            *_PIP_AUDIT,
            "--progress-spinner",
            "off",
        ]
        try:
            done = subprocess.run([*command, *sys.argv[1:]], capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"not audited: no answer within {_LIMIT_S} s")
            return
    try:
        audited = json.loads(done.stdout)["dependencies"]
    except ValueError:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        if _UNREACHABLE.search(said) is None:
            raise SystemExit(done.stderr) from None
        print(f"not audited, as the data cannot be reached: {said}")
        return
    found = [(one["name"], one["version"], flaw) for one in audited for flaw in one.get("vulns", ())]
    for name, version, flaw in found:
        mended = ", ".join(flaw["fix_versions"]) or "none"
        print(f"{name} {version}: {flaw['id']}; versions without it: {mended}")
    print(f"{len(audited)} packages audited: {len(found)} known vulnerabilities")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
