"""Every relative link of a page leads to a file and a heading, and every file that a page names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
    if ".venv" not in page.parts
)
LINK = re.compile(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
NAMED = re.compile(
    r"`((?:device|epd_serve|proxy|deploy|docs|tests|benchmarks|requirements)/[\w./-]*\w\.(?:py|md|yaml|json|sh))`"
)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(CODE.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: no {path}"
        assert not anchor or anchor in anchors(target), f"{page}: {path} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    missing = {name for name in NAMED.findall(page.read_text()) if not (ROOT / name).exists()}
    assert not missing


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
