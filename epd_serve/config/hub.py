"""Models by their names on the Hugging Face hub, found in the local cache without the hub's library."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """A repository of the hub, ``Qwen/Qwen2.5-VL-3B-Instruct``, and one of its branches, tags or commits."""

    repo: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """``ORG/NAME`` or ``ORG/NAME@REVISION``; None for text of another form, which is a path."""
        match = _NAME.fullmatch(text)
        return cls(repo=match["repo"], revision=match["revision"] or "main") if match else None

    def cached(self) -> Path | None:
        """The directory of the cache that holds the model, or a part of it; None where there is none."""
        folder = _cache() / f"models--{self.repo.replace('/', '--')}"
        reference = folder / "refs" / self.revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else self.revision
        found = folder / "snapshots" / commit
        return found if found.is_dir() else None

    @property
    def command(self) -> str:
        """The command that downloads the model into the cache."""
        return f"hf download {self.repo}" + ("" if self.revision == "main" else f" --revision {self.revision}")


def beside(model: str, here: Path) -> str:
    """A model as a file in ``here``, or somebody who stands there, names it: an absolute path, or a hub's name."""
    path = here / Path(model).expanduser()
    return model if HubModel.parse(model) is not None and not path.is_dir() else str(path)


def _cache() -> Path:
    """As huggingface_hub has it, by the same variables."""
    if explicit := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"
