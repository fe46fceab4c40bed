"""The directory of a model: found by its name on the Hugging Face hub, its files checked before it is loaded."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

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


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_INDEX = "model.safetensors.index.json"
#: In the names of the tower's weights and of its projector's.
_TOWER = re.compile(r"visual|vision|audio|projector|connector|merger|image_newline")
_LFS = b"version https://git-lfs"
#: The longest header that the format allows.
_MAX_HEADER_BYTES = 100_000_000
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_model_config(path: Path) -> dict[str, Any]:
    """The content of config.json; of a model that also speaks, of the part that answers in text.

    Raises ValueError where it cannot be read.
    """
    content = _read_json(path / "config.json")
    if thinker := content.get("thinker_config"):
        content |= {**thinker, "architectures": content.get("architectures")}
    return content


def check_model_files(path: Path) -> dict[str, int]:
    """The number of weights of ``tower`` and ``language``, by the headers of the files.

    Raises ValueError that names the file which is missing, cut short or no JSON. The format of
    safetensors: eight bytes with the header's length, the header as JSON, the tensors' bytes.
    """
    needed: list[tuple[tuple[str, ...], str]] = [(_TOKENIZERS, "tokenizer")]
    config = read_model_config(path)
    if "vision_config" in config or "audio_config" in config:
        needed.append((_PROCESSORS, "image processor" if "vision_config" in config else "feature extractor"))
    for names, what in needed:
        present = [path / name for name in names if (path / name).is_file()]
        if not present:
            raise ValueError(f"{path}: there is no {names[0]}, so the model has no {what}; copy it from the model")
        for file in present:
            if file.suffix == ".json":
                _read_json(file, _OBJECT.decode)  # a tokenizer has megabytes
    whole = path / "model.safetensors"
    if (path / _INDEX).is_file() and not whole.is_file():  # transformers reads no index beside the whole
        weights = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weights, dict):
            raise ValueError(f"{path / _INDEX}: there is no weight_map in it; download the file again")
        files = sorted({path / str(name) for name in weights.values()})
    else:
        files = [whole]
    check_template(chat_template(path), path)
    counts = {"tower": 0, "language": 0}
    for file in files:
        for name, num_weights in _check_safetensors(file):
            counts["tower" if _TOWER.search(name) else "language"] += num_weights
    return counts


def check_max_model_len(asked: int, max_positions: int) -> None:
    """Raise ValueError where a context is asked for that the model was not made for."""
    if asked > max_positions:
        raise ValueError(
            f"max_model_len: {asked} is beyond the model's {max_positions} tokens; write {max_positions} or less, "
            "or leave it out"
        )


def chat_template(path: Path) -> str:
    """The text of a model's chat template; "" where it has none, or several by name."""
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


def _read_json(file: Path, parse: Callable[[bytes], Any] | None = None) -> dict[str, Any]:
    try:
        data = file.read_bytes()
        content = json.loads(data.decode()) if parse is None else parse(data)  # UTF-8 alone, as transformers
    except OSError as error:
        raise ValueError(f"{file}: it cannot be read: {error.strerror}") from error
    except ValueError as error:
        pointer = _pointer(file)
        raise ValueError(f"{file}: {pointer or f'it is no JSON: {error}'}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: it must be a JSON object")
    return content


def _check_safetensors(file: Path) -> list[tuple[str, int]]:
    """(name, number of values) of each tensor."""
    again = "download the file again"
    if not file.is_file():
        pickled = "; pytorch_model.bin is a pickle, save it again with save_pretrained of transformers"
        told = pickled if (file.parent / "pytorch_model.bin").exists() else ""
        raise ValueError(f"{file}: there is no such file; weights are read from safetensors files alone{told}")
    if pointer := _pointer(file):
        raise ValueError(f"{file}: {pointer}")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file}: it is no safetensors file, or was cut short; {again}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((one["data_offsets"][1] for one in header.values()), default=0)
            sizes = [(name, math.prod(one["shape"])) for name, one in header.items()]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: its header is none of a safetensors file; {again}") from error
    if size != 8 + length + end:
        raise ValueError(f"{file}: it has {size} bytes and by its header {8 + length + end}; {again}")
    return sizes


def _pointer(file: Path) -> str:
    with file.open("rb") as stream:
        return "it is a Git LFS pointer; run 'git lfs pull' there" if stream.read(len(_LFS)) == _LFS else ""
