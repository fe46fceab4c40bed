"""The report: one JSON, one HTML and one JUnit file."""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from xml.sax.saxutils import quoteattr

import msgspec

from epd_serve.verify.check import CHECKS, Result

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; width: 100%; }} td, th {{ text-align: left; vertical-align: top;
padding: 6px 10px; border-bottom: 1px solid #d9dde2; }} .fail {{ color: #b42318; font-weight: 700; }}
.pass {{ color: #0b7a3e; }}
pre {{ white-space: pre-wrap; word-break: break-all; font-size: 12px; }}
</style><h1>{title}</h1><p>{summary}</p><table><tr><th>check<th>outcome<th>seconds<th>proves</tr>{rows}</table></html>
"""


class Report(msgspec.Struct):
    """The results of one server."""

    url: str
    model: str
    results: list[Result]

    def counts(self) -> str:
        found = Counter(one.outcome for one in self.results)
        return ", ".join(f"{found[name]} {name}" for name in ("pass", "fail", "unjudged", "skipped"))


def write(report: Report, directory: Path) -> None:
    """Write ``verify.json``, ``verify.html`` and ``junit.xml``."""
    (directory / "verify.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    (directory / "verify.html").write_text(_html(report), encoding="utf-8")
    (directory / "junit.xml").write_text(_junit(report), encoding="utf-8")


def _html(report: Report) -> str:
    rows = ""
    for one in report.results:
        known = CHECKS.get(one.check)
        about = f"{escape(known.proves)}<br><small>{escape(known.origin)}</small>" if known else ""
        reason = f"<br>{escape(one.reason)}" if one.reason else ""
        curl = f"<pre>{escape(one.curl)}</pre>" if one.curl else ""
        rows += f'<tr><td>{escape(one.check)}<td class="{one.outcome}">{one.outcome}'
        rows += f"<td>{one.seconds:.2f}<td>{about}{reason}{curl}</tr>"
    title = f"verify: {report.model} at {report.url}"
    return _PAGE.format(title=escape(title), summary=escape(report.counts()), rows=rows)


def _junit(report: Report) -> str:
    cases = ""
    for one in report.results:
        head = f"<testcase classname={quoteattr(one.suite)} name={quoteattr(one.check)} time='{one.seconds}'>"
        tag = {"pass": "", "fail": "failure"}.get(one.outcome, "skipped")
        body = f"<{tag} message={quoteattr(_plain(one.reason))}>{escape(_plain(one.curl))}</{tag}>" if tag else ""
        cases += f"{head}{body}</testcase>"
    fails = sum(one.outcome == "fail" for one in report.results)
    skips = sum(one.outcome in ("unjudged", "skipped") for one in report.results)
    head = (
        f"<testsuite name='epd-serve verify' tests='{len(report.results)}' failures='{fails}' skipped='{skips}'>"
    )
    return f"<?xml version='1.0' encoding='utf-8'?>{head}{cases}</testsuite>"


def _plain(text: str) -> str:
    """Without the characters that no XML may have."""
    return "".join(one if one >= " " or one in "\n\t" else "?" for one in text)
