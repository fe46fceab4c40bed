"""``--model ORG/NAME``: from the local cache of the Hugging Face hub, or downloaded into it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from epd_serve.config import DeploymentConfig, load_config, model_path
from epd_serve.config.model_files import HubModel, resolve_model_name
from epd_serve.demo import weights_dir
from epd_serve.launch.download import download

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Stands in for the hub: fills the cache."""

    def __init__(self, cache: Path) -> None:
        self.folder = cache / "models--acme--tiny"
        self.asked: list[str] = []

    def snapshot_download(self, repo: str, *, revision: str, **patterns: Any) -> None:
        self.asked.append(f"{repo}@{revision}")
        (self.folder / "refs").mkdir(parents=True, exist_ok=True)
        (self.folder / "refs" / revision).write_text(COMMIT)
        shutil.copytree(weights_dir(), self.folder / "snapshots" / COMMIT, dirs_exist_ok=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_a_model_is_downloaded_once(hub: Hub) -> None:
    with pytest.raises(ValueError, match="download it with 'hf download acme/tiny'"):
        model_path("acme/tiny")
    for _ in range(2):
        download("acme/tiny")
    assert hub.asked == ["acme/tiny@main"], "the cache has all of it"
    assert model_path("acme/tiny") == hub.folder / "snapshots" / COMMIT
    (model_path("acme/tiny") / "model.safetensors").unlink()  # a download that broke off
    download("acme/tiny")
    download("acme/tiny@v1")
    assert hub.asked[1:] == ["acme/tiny@main", "acme/tiny@v1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", HubModel(repo="Qwen/Qwen2.5-VL-3B-Instruct")),
        ("a/b@refs/pr/1", HubModel(repo="a/b", revision="refs/pr/1")),
        *((path, None) for path in ("demo", "./a/b", "/a/b", "~/b", "a/b/c", "a/", "models/.hidden")),
    ],
)
def test_names_and_paths(text: str, expected: HubModel | None) -> None:
    assert HubModel.parse(text) == expected


def test_a_file_names_a_model_of_the_hub_or_a_directory_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("model: acme/tiny")
    config = load_config(file)
    assert (config.model, config.model_name) == ("acme/tiny", "acme/tiny")
    shutil.copytree(weights_dir(), tmp_path / "acme" / "tiny")
    assert load_config(file).model == resolve_model_name("acme/tiny", tmp_path) == str(tmp_path / "acme" / "tiny")
    assert DeploymentConfig(model="acme/tiny", served_model_name="mine").model_name == "mine"
