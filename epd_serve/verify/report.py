"""The results of one server, as JSON and as JUnit's XML."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from epd_serve.verify.check import Result


class Report(msgspec.Struct):
    """The results of one server."""

    url: str
    model: str
    results: list[Result]

    def counts(self) -> str:
        """Return how many checks had each outcome, in words."""
        counts = Counter(one.outcome for one in self.results)
        return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())

    def write(self, directory: Path) -> None:
        """Write verify.json and junit.xml."""
        (directory / "verify.json").write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        counts = Counter(one.outcome for one in self.results)
        skipped = counts["unjudged"] + counts["skipped"]
        heading = {"tests": len(self.results), "failures": counts["fail"], "skipped": skipped}
        suite = ElementTree.Element(
            "testsuite", {"name": "epd-serve verify", **{k: str(n) for k, n in heading.items()}}
        )
        for one in self.results:
            about = {"classname": one.suite, "name": one.check, "time": str(one.seconds)}
            case = ElementTree.SubElement(suite, "testcase", about)
            if one.outcome != "pass":
                tag = "failure" if one.outcome == "fail" else "skipped"
                ElementTree.SubElement(case, tag, {"message": _plain(one.reason)}).text = _plain(one.curl)
        ElementTree.ElementTree(suite).write(directory / "junit.xml", encoding="utf-8", xml_declaration=True)


def _plain(text: str) -> str:
    """Replace the characters that XML forbids."""
    return "".join(one if one >= " " or one in "\n\t" else "?" for one in text)
