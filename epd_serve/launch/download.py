"""Downloads a model from the Hugging Face hub, once, before any process of a deployment starts."""

from __future__ import annotations

from pathlib import Path

from epd_serve.config import DEMO_MODEL
from epd_serve.config.model_files import HubModel, check_model_files

#: Files that engines read; weights in other formats stay where they are.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_NOT = ["original/*", "onnx/*", "*/*.safetensors"]


def download(model: str) -> None:
    """Fetch a model that the hub has into the local cache, with a progress bar.

    The hub is asked only where the cache lacks something. Raises ValueError with the hub's reason.
    """
    named = HubModel.parse(model)
    if model == DEMO_MODEL or named is None or Path(model).is_dir() or _is_whole(named):
        return
    try:
        from huggingface_hub import snapshot_download

        snapshot_download(named.repo, revision=named.revision, allow_patterns=_FILES, ignore_patterns=_NOT)
    except Exception as error:  # of whichever HTTP library the hub's uses, or the disk's
        name = named.repo.rpartition("/")[2]
        raise ValueError(
            f"model {model!r} cannot be downloaded: {error}\nTry again: whole files are kept. Or run "
            f"'{named.command} --local-dir {name}' where the hub can be reached, copy that directory here, and "
            f"write 'epd-serve up ./{name}'"
        ) from error


def _is_whole(named: HubModel) -> bool:
    found = named.cached()
    try:
        return found is not None and bool(check_model_files(found))
    except (ValueError, ModuleNotFoundError):
        return False
