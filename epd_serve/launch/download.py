"""Download a model from the Hugging Face hub before a deployment starts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from epd_serve.config import DEMO_MODEL
from epd_serve.config.model_files import HubModel, check_model_files

#: Files that engines read.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_NOT = ["original/*", "onnx/*", "*/*.safetensors"]


def download(model: str) -> None:
    """Download a model of the hub into the local cache, with a progress bar, unless the cache is complete.

    Raises ValueError with the hub's reason.
    """
    named = HubModel.parse(model)
    if model == DEMO_MODEL or named is None or Path(model).is_dir():
        return
    with suppress(ValueError, ModuleNotFoundError):
        if (found := named.cached()) is not None and check_model_files(found):
            return
    try:
        from huggingface_hub import snapshot_download

        snapshot_download(named.repo, revision=named.revision, allow_patterns=_FILES, ignore_patterns=_NOT)
    except Exception as error:  # of the hub's HTTP library or the disk
        name = named.repo.rpartition("/")[2]
        raise ValueError(
            f"model {model!r} cannot be downloaded: {error}\nTry again: complete files are kept. Or run "
            f"'{named.command} --local-dir {name}' on a machine that reaches the hub, copy the directory here, "
            f"and run 'epd-serve up ./{name}'"
        ) from error
