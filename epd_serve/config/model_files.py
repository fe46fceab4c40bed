"""The files of a transformers model directory, checked before any process loads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
#: The longest header that the format allows.
_MAX_HEADER_BYTES = 100_000_000
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_model_files(path: Path) -> None:
    """Raise ValueError that names the file which is missing, cut short or no JSON. Reads headers alone.

    The format of safetensors: eight bytes with the header's length, the header as JSON, the tensors' bytes.
    """
    _read_json(path / "config.json")
    for names, what in ((_TOKENIZERS, "tokenizer"), (_PROCESSORS, "image processor")):
        present = [path / name for name in names if (path / name).is_file()]
        if not present:
            raise ValueError(f"{path}: there is no {names[0]}, so the model has no {what}; copy it from the model")
        for file in present:
            if file.suffix == ".json":
                _read_json(file, _OBJECT.decode)  # a tokenizer has megabytes
    if (path / _INDEX).is_file():
        weights = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weights, dict):
            raise ValueError(f"{path / _INDEX}: there is no weight_map in it; download the file again")
        files = sorted({path / str(name) for name in weights.values()})
    else:
        files = sorted(path.glob("*.safetensors")) or [path / "model.safetensors"]
    for file in files:
        _check_safetensors(file)


def _read_json(file: Path, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    try:
        content = parse(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file}: it cannot be read: {error.strerror}") from error
    except ValueError as error:
        pointer = _pointer(file)
        raise ValueError(f"{file}: {pointer or f'it is no JSON: {error}'}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: it must be a JSON object")
    return content


def _check_safetensors(file: Path) -> None:
    again = "download the file again"
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; weights are read from safetensors files alone")
    if pointer := _pointer(file):
        raise ValueError(f"{file}: {pointer}")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file}: it is no safetensors file, or was cut short; {again}")
        try:
            header = json.loads(stream.read(length))
            end = max(
                (one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: its header is none of a safetensors file; {again}") from error
    if size != 8 + length + end:
        raise ValueError(f"{file}: it has {size} bytes and by its header {8 + length + end}; {again}")


def _pointer(file: Path) -> str:
    with file.open("rb") as stream:
        return "it is a Git LFS pointer; run 'git lfs pull' there" if stream.read(len(_LFS)) == _LFS else ""
