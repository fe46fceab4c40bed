"""Every relative link of a page leads to a file and a heading; files and options that a page names exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from epd_serve.config import DeploymentConfig

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

MODULE = re.compile(r"python -m ((?:benchmarks|epd_serve)\.[\w.]*\w)")
OPTION = re.compile(r"`((?:gateway|instances|vllm|elastic|mooncake|slo)\.[a-z_][a-z_.0-9]*)(?::[^`]*)?`")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_options_of_a_page_exist(page: Path) -> None:
    for path, anchor in LINK.findall(CODE.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: no {path}"
        assert not anchor or anchor in anchors(target), f"{page}: {path} has no heading #{anchor}"
    missing = {name for name in NAMED.findall(page.read_text()) if not (ROOT / name).exists()}
    modules = [ROOT / name.replace(".", "/") for name in MODULE.findall(page.read_text())]
    files = ((module.with_suffix(".py"), module / "__main__.py") for module in modules)
    missing |= {str(module) for module, package in files if not module.is_file() and not package.is_file()}
    assert missing == set()
    assert {path for path in OPTION.findall(page.read_text()) if not is_option(DeploymentConfig, path)} == set()


def is_option(section: type[BaseModel], path: str) -> bool:
    """Whether a path as ``gateway.media.max_items`` leads to an option, or to a section of options."""
    name, _, rest = path.partition(".")
    if (field := section.model_fields.get(name)) is None:
        return False
    below = [field.annotation, *get_args(field.annotation)]
    sections = [one for one in below if isinstance(one, type) and issubclass(one, BaseModel)]
    return not rest or any(is_option(one, rest) for one in sections)
