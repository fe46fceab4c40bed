"""Downloads a model from the Hugging Face hub, once, before any process of a deployment starts."""

from __future__ import annotations

import os
from pathlib import Path

from epd_serve.config import DEMO_MODEL
from epd_serve.config.model_files import HubModel, check_model_files

#: Files that engines read; weights in other formats stay where they are.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_NOT = ["original/*", "onnx/*", "*/*.safetensors"]


def download(model: str) -> None:
    """Fetch a model that the hub has into the local cache, with a progress bar.

    The hub is asked only where the cache lacks something. Raises ValueError with what to do instead.
    """
    named = HubModel.parse(model)
    if model == DEMO_MODEL or named is None or Path(model).is_dir() or _is_whole(named):
        return
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ModuleNotFoundError as error:
        raise ValueError(f"model {model!r}: {error.name} is not installed. {_advice(named)}") from error
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"model {model!r} is not in the cache, and HF_HUB_OFFLINE is set. {_advice(named)}")
    endpoint = constants.ENDPOINT
    try:
        snapshot_download(named.repo, revision=named.revision, allow_patterns=_FILES, ignore_patterns=_NOT)
    except errors.GatedRepoError as error:
        raise ValueError(
            f"model {model!r} is gated: ask for it at {endpoint}/{named.repo}, and set HF_TOKEN to a token of the "
            "account that has been let in, or run 'hf auth login'"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"model {model!r}: it has no branch, tag or commit {named.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        token = "HF_TOKEN is of an account that may not see it" if os.environ.get("HF_TOKEN") else "it is private"
        raise ValueError(
            f"model {model!r}: there is no such directory, and {endpoint} has no such model, or {token}"
        ) from error
    except Exception as error:  # of whichever HTTP library the hub's uses, or the disk's
        raise ValueError(
            f"model {model!r} cannot be downloaded from {endpoint}: {_reason(error)}. Try again: whole files "
            f"are kept. {_advice(named)}"
        ) from error


def _reason(error: BaseException) -> str:
    """The first cause of an error, in a line: the hub's library says of most that the cache lacks the file."""
    while error.__cause__ is not None and "cache" in str(error):
        error = error.__cause__
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _advice(named: HubModel) -> str:
    name = named.repo.rpartition("/")[2]
    return (
        f"Where the hub can be reached run '{named.command} --local-dir {name}', copy that directory here, and "
        f"write --model ./{name}"
    )


def _is_whole(named: HubModel) -> bool:
    found = named.cached()
    if found is None:
        return False
    try:
        check_model_files(found)
    except ValueError:
        return False
    return True
