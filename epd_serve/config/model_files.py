"""The directory of a model: found by its name on the Hugging Face hub, its files checked before it is loaded."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from epd_serve.demo import weights_dir

DEMO_MODEL = "demo"

_AGAIN = "download the file again, or run 'git lfs pull' there"
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
        """Return the directory of the local cache with the model, or a part of it; None where there is none."""
        if importlib.util.find_spec("huggingface_hub") is None:
            return None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, "config.json", revision=self.revision)
        return Path(found).parent if isinstance(found, str) else None

    @property
    def command(self) -> str:
        """The command that downloads the model into the cache."""
        return f"hf download {self.repo}" + ("" if self.revision == "main" else f" --revision {self.revision}")


def beside(model: str, here: Path) -> str:
    """A model as a file in ``here``, or somebody who stands there, names it: an absolute path, or a hub's name."""
    path = here / Path(model).expanduser()
    return model if HubModel.parse(model) is not None and not path.is_dir() else str(path)


def model_path(model: str) -> Path:
    """Return a model's directory: the built-in one for ``demo``, the named one, or that of the hub's cache.

    Raises ValueError that says what is missing.
    """
    if model == DEMO_MODEL:
        return weights_dir()
    path, named = Path(model).expanduser().resolve(), HubModel.parse(model)
    if not path.is_dir() and named is not None:
        if (found := named.cached()) is None:
            raise ValueError(
                f"model {model!r}: there is no directory {path}, and the Hugging Face cache has no model of that "
                f"name; download it with '{named.command}', as 'epd-serve up' does"
            )
        return found
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model {model!r}: {path} is no directory with a config.json; name one with a model of "
            "transformers, or the model's name on the Hugging Face hub"
        )
    return path


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
#: In the names of the tower's weights and of its projector's.
_TOWER = re.compile(r"visual|vision|audio|projector|connector|merger|image_newline")


def read_model_config(path: Path) -> dict[str, Any]:
    """The content of config.json; of a model that also speaks, of the part that answers in text.

    Raises ValueError where it cannot be read.
    """
    content = _read_json(path / "config.json")
    if thinker := content.get("thinker_config"):
        content |= {**thinker, "architectures": content.get("architectures")}
    return content


def check_model_files(path: Path) -> dict[str, int]:
    """Return the number of weights of ``tower`` and ``language``, by the headers of the files.

    Raises ValueError that names the file which is missing or broken.
    """
    read_model_config(path)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise ValueError(
            f"{path}: there is no {_TOKENIZERS[0]}, so the model has no tokenizer; copy it from the model"
        )
    files, index = [path / "model.safetensors"], path / "model.safetensors.index.json"
    if index.is_file() and not files[0].is_file():  # transformers reads no index beside the whole
        files = sorted({path / str(name) for name in dict(_read_json(index).get("weight_map") or {}).values()})
    check_template(chat_template(path), path)
    counts = {"tower": 0, "language": 0}
    for file in files:
        for name, num_weights in _count_weights(file).items():
            counts["tower" if _TOWER.search(name) else "language"] += num_weights
    return counts


def check_max_model_len(asked: int, max_positions: int) -> None:
    """Raise ValueError where a context is asked for that the model was not made for."""
    if asked > max_positions:
        raise ValueError(
            f"max_model_len: {asked} is beyond the model's {max_positions} tokens; write {max_positions} or less, "
            "or leave it out"
        )


def chat_template(path: Path, chosen: Path | None = None) -> str:
    """Return the text of a model's chat template; "" where it has none, or several by name.

    ``chosen`` is a file to read in its place. Raises ValueError where it cannot be read.
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
    """Raise ValueError where a chat template is no Jinja."""
    if importlib.util.find_spec("jinja2") is None:  # the base install has no instance that renders it
        return
    from jinja2 import Environment, TemplateError

    try:
        parse_template(Environment(extensions=["jinja2.ext.loopcontrols"]), source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise ValueError(f"{path}: its chat template{where} is broken: {error}; copy it from the model") from error


def parse_template(environment: Any, source: str) -> Any:
    """Parse a chat template; one block is transformers' own, and plain Jinja does not know it."""
    return environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes().decode())  # UTF-8 alone, as transformers
    except OSError as error:
        raise ValueError(f"{file}: it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{file}: it is no JSON: {error}; {_AGAIN}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: it must be a JSON object")
    return content


def _count_weights(file: Path) -> dict[str, int]:
    """Return the number of values of each tensor of a safetensors file. Raises ValueError where it is broken.

    Its header tells: 8 bytes of length, then JSON. The library would import numpy for it.
    """
    try:
        with file.open("rb") as content:
            start = 8 + int.from_bytes(content.read(8), "little")
            end = os.fstat(content.fileno()).st_size
            if start > end:
                raise ValueError("it is cut off in its header")
            tensors = json.loads(content.read(start - 8))
        tensors.pop("__metadata__", None)
        if start + max((one["data_offsets"][1] for one in tensors.values()), default=0) != end:
            raise ValueError("its weights are cut off")
        return {name: math.prod(one["shape"]) for name, one in tensors.items()}
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}; weights are read from safetensors files alone; {_AGAIN}") from error
