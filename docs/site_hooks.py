"""The site has the repository's files that its pages link to, below ``repository/``; links lead there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")


def place_of(file: Path) -> str:
    """The path within the site's sources of a file of the repository."""
    docs = ROOT / "docs"
    return str(file.relative_to(docs) if file.is_relative_to(docs) else "repository" / file.relative_to(ROOT))


def linked(page: Path) -> set[Path]:
    """Files outside docs/ to which a page leads, over other such pages, too."""
    found: set[Path] = set()
    pages = [page]
    while pages:
        source = pages.pop()
        for path, _ in LINK.findall(source.read_text(encoding="utf-8")):
            target = Path(os.path.normpath(source.parent / path))
            if target.is_file() and not target.is_relative_to(ROOT / "docs") and target not in found:
                found.add(target)
                if target.suffix == ".md":
                    pages.append(target)
    return found


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    pages = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    for file in sorted(set[Path]().union(*map(linked, pages))):
        files.append(File.generated(config, place_of(file), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(str(page.file.abs_src_path))

    def of_site(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[1]))
        path: Any = os.path.relpath(place_of(target), Path(page.file.src_uri).parent)
        return f"{path}{match[2] or ''}"

    return LINK.sub(of_site, markdown)
