"""Find a model's directory, also by its Hugging Face hub name, and check its files before loading."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from epd_serve.demo import weights_dir
from epd_serve.weight_files import DOWNLOAD_AGAIN, read_header

DEMO_MODEL = "demo"

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """A hub repository, such as ``Qwen/Qwen2.5-VL-3B-Instruct``, and a branch, tag or commit."""

    repo: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse ``ORG/NAME`` or ``ORG/NAME@REVISION``; None for other text, which is a path."""
        match = _NAME.fullmatch(text)
        return cls(repo=match["repo"], revision=match["revision"] or "main") if match else None

    def cached(self) -> Path | None:
        """Return the local cache directory of the model, possibly incomplete; None if it is missing."""
        if importlib.util.find_spec("huggingface_hub") is None:
            return None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, "config.json", revision=self.revision)
        return Path(found).parent if isinstance(found, str) else None

    @property
    def command(self) -> str:
        """The command that downloads the model into the cache."""
        return f"hf download {self.repo}" + ("" if self.revision == "main" else f" --revision {self.revision}")


def resolve_model_name(model: str, here: Path) -> str:
    """Resolve a model name relative to ``here``: return an absolute path, or a hub name unchanged."""
    path = here / Path(model).expanduser()
    return model if HubModel.parse(model) is not None and not path.is_dir() else str(path)


def model_path(model: str) -> Path:
    """Return a model's directory: the built-in one for ``demo``, the named one, or its hub cache.

    Raises ValueError with the missing part.
    """
    if model == DEMO_MODEL:
        return weights_dir()
    path, named = Path(model).expanduser().resolve(), HubModel.parse(model)
    if not path.is_dir() and named is not None:
        if (found := named.cached()) is None:
            raise ValueError(
                f"model {model!r}: directory {path} does not exist, and the Hugging Face cache lacks a model of "
                f"that name; download it with '{named.command}', as 'epd-serve up' does"
            )
        return found
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model {model!r}: {path} is not a directory with a config.json; write the directory of a "
            "transformers model, or the model's name on the Hugging Face hub"
        )
    return path


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
#: Parts of the names of weights of towers and projectors.
_TOWER = re.compile(r"visual|vision|audio|projector|connector|merger|image_newline")


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json, or only the text-generating part of a model that also speaks.

    Raises ValueError if it cannot be read.
    """
    content = _read_json(path / "config.json")
    if thinker := content.get("thinker_config"):
        content |= {**thinker, "architectures": content.get("architectures")}
    return content


def check_model_files(path: Path) -> dict[str, int]:
    """Return the number of weights of ``tower`` and ``language``, read from the files' headers.

    Raises ValueError with the missing or broken file.
    """
    read_model_config(path)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise ValueError(f"{path}: the model lacks a tokenizer ({_TOKENIZERS[0]}); copy it from the model")
    files, index = [path / "model.safetensors"], path / "model.safetensors.index.json"
    if index.is_file() and not files[0].is_file():  # transformers ignores the index if the whole file exists
        files = sorted({path / str(name) for name in dict(_read_json(index).get("weight_map") or {}).values()})
    check_template(chat_template(path), path)
    counts = {"tower": 0, "language": 0}
    for file in files:
        for name, tensor in read_header(file)[1].items():
            counts["tower" if _TOWER.search(name) else "language"] += math.prod(tensor["shape"])
    return counts


def check_max_model_len(asked: int, max_positions: int) -> None:
    """Raise ValueError if the requested context exceeds the model's."""
    if asked > max_positions:
        raise ValueError(
            f"max_model_len: {asked} exceeds the model's {max_positions} tokens; write {max_positions} or less, "
            "or remove it"
        )


def chat_template(path: Path, chosen: Path | None = None) -> str:
    """Return the text of a model's chat template; "" if it has none, or several by name.

    ``chosen`` is a file to read instead. Raises ValueError if it cannot be read.
    """
    if chosen is not None:
        try:
            return chosen.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
            raise ValueError(f"chat_template: {chosen} cannot be read: {reason}") from error
    if (file := path / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (file := path / name).is_file() and isinstance(text := _read_json(file).get("chat_template"), str):
            return text
    return ""


def check_template(source: str, path: Path) -> None:
    """Raise ValueError if a chat template is not valid Jinja."""
    if importlib.util.find_spec("jinja2") is None:  # the base install does not render templates
        return
    from jinja2 import Environment, TemplateError

    try:
        parse_template(Environment(extensions=["jinja2.ext.loopcontrols"]), source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise ValueError(f"{path}: its chat template{where} is broken: {error}; copy it from the model") from error


def parse_template(environment: Any, source: str) -> Any:
    """Parse a chat template without transformers' own block, which plain Jinja does not know."""
    return environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes().decode())  # UTF-8 only, like transformers
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: invalid JSON: {error}; {DOWNLOAD_AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: it must be a JSON object")
    return content
