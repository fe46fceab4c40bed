"""``--model ORG/NAME``, against a server that speaks the routes of the hub that huggingface_hub asks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from epd_serve.config import DeploymentConfig, load_config, model_path
from epd_serve.config.model_files import HubModel, beside
from epd_serve.demo import weights_dir

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {file.name: file.read_bytes() for file in weights_dir().iterdir() if file.is_file()}
#: What up does with a model's name before it starts a process.
PROGRAM = """
import os, sys
from epd_serve.config import change_config, DeploymentConfig, model_path
from epd_serve.launch.download import download
from epd_serve.launch.preflight import check_deployment
try:
    config = change_config(DeploymentConfig(), {"model": sys.argv[1], "gateway": {"port": 0}})
    download(config.model)
    check_deployment(config, os.environ)
    print(config.model_name, model_path(config.model))
except ValueError as error:
    print(error)
"""


@dataclass
class Hub:
    """A hub with the model acme/tiny.

    Attributes:
        num_whole: downloads of weights that break off half way. slow_s: before each piece of a file.
        error: of every answer, (status, X-Error-Code).
    """

    num_whole: int = 0
    slow_s: float = 0.0
    error: tuple[int, str] | None = None
    token: str | None = None
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(f"{request.command} {request.path}")
        path = request.path.partition("?")[0]
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return self.send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if self.error is not None:
            return self.send(request, self.error[0], b"{}", {"X-Error-Code": self.error[1]})
        if path.startswith("/api/models/acme/tiny/revision/") or path == "/api/models/acme/tiny":
            if path.rpartition("/")[2] not in ("main", "v1", COMMIT, "tiny"):
                return self.send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            info = {"id": "acme/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            return self.send(request, 200, json.dumps(info).encode(), {})
        if path.startswith("/api/models/acme/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            return self.send(request, 200, json.dumps(tree).encode(), {})
        prefix, _, name = path.rpartition("/")
        if prefix == f"/acme/tiny/resolve/{COMMIT}" and name in FILES:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(FILES[name]).hexdigest()}"'}
            return self.send(request, 200, FILES[name], headers, cuts=name.endswith(".safetensors"))
        return self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str],
        cuts: bool = False,
    ) -> None:
        start = 0
        if (wanted := request.headers.get("range")) and status == 200 and wanted.startswith("bytes="):
            first = wanted.removeprefix("bytes=").split("-")[0]
            self.ranges.append(wanted)
            start, status = int(first), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        end = len(data)
        if cuts and self.num_whole > 0:
            self.num_whole -= 1
            end = start + (len(data) - start) // 2
        for at in range(start, end, 1 << 16):
            time.sleep(self.slow_s)
            request.wfile.write(data[at : min(at + (1 << 16), end)])
        if end < len(data):
            request.wfile.flush()
            request.close_connection = True


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state.answer(self)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def up(url: str, home: Path, model: str = "acme/tiny", **variables: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {
        **own,
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model], env=environment, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


def snapshot(home: Path) -> str:
    return f"acme/tiny {home}/hub/models--acme--tiny/snapshots/{COMMIT}"


@pytest.mark.parametrize("slow_s", [0.0, pytest.param(0.02, marks=pytest.mark.slow)])
def test_a_model_is_downloaded_once(hub: tuple[Hub, str], tmp_path: Path, slow_s: float) -> None:
    state, url = hub
    state.slow_s = slow_s
    assert up(url, tmp_path) == snapshot(tmp_path)
    state.asked.clear()
    assert up(url, tmp_path) == snapshot(tmp_path)
    assert up(url, tmp_path, HF_HUB_OFFLINE="1") == snapshot(tmp_path)
    assert state.asked == [], "the cache has all of it"


def test_a_revision_is_its_own(hub: tuple[Hub, str], tmp_path: Path) -> None:
    state, url = hub
    assert up(url, tmp_path, "acme/tiny@v1") == snapshot(tmp_path)
    assert any(one.endswith("/revision/v1") for one in state.asked)
    assert "'acme/tiny@v9' cannot be downloaded" in up(url, tmp_path, "acme/tiny@v9")


def test_where_the_hub_cannot_be_asked_the_command_is_named(hub: tuple[Hub, str], tmp_path: Path) -> None:
    state, url = hub
    for said in (
        up("http://127.0.0.1:9", tmp_path, "acme/tiny@v1"),
        up(url, tmp_path, "acme/tiny@v1", HF_HUB_OFFLINE="1"),
    ):
        assert "cannot be downloaded" in said
        assert "'hf download acme/tiny --revision v1 --local-dir tiny'" in said and "--model ./tiny" in said
    assert state.asked == []


def test_a_download_that_breaks_off_goes_on(hub: tuple[Hub, str], tmp_path: Path) -> None:
    state, url = hub
    state.num_whole = 100
    said = up(url, tmp_path)
    assert "cannot be downloaded" in said and "Try again: whole files are kept." in said
    state.num_whole = 0
    state.asked.clear()
    assert up(url, tmp_path) == snapshot(tmp_path)
    fetched = [one for one in state.asked if one.startswith("GET /acme/tiny/resolve/")]
    assert [one.rpartition("/")[2] for one in fetched] == ["model.safetensors"]


def test_who_may_not_have_it_is_refused(hub: tuple[Hub, str], tmp_path: Path) -> None:
    state, url = hub
    state.error = (403, "GatedRepo")
    assert "cannot be downloaded" in up(url, tmp_path)
    state.error, state.token = None, "hf_right"
    assert "cannot be downloaded" in up(url, tmp_path, HF_TOKEN="hf_wrong")
    assert up(url, tmp_path, HF_TOKEN="hf_right") == snapshot(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", HubModel(repo="Qwen/Qwen2.5-VL-3B-Instruct")),
        ("a/b@refs/pr/1", HubModel(repo="a/b", revision="refs/pr/1")),
        *((path, None) for path in ("demo", "./a/b", "/a/b", "../b", "~/b", "a/b/c", "a/", "models/.hidden")),
    ],
)
def test_names_and_paths(text: str, expected: HubModel | None) -> None:
    assert HubModel.parse(text) == expected


def test_a_file_names_a_model_of_the_hub_or_a_directory_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "deployment.yaml"
    file.write_text("model: acme/tiny")
    config = load_config(file)
    assert (config.model, config.model_name) == ("acme/tiny", "acme/tiny")
    with pytest.raises(ValueError, match="download it with 'hf download acme/tiny'"):
        model_path(config.model)
    shutil.copytree(weights_dir(), tmp_path / "acme" / "tiny")
    assert load_config(file).model == beside("acme/tiny", tmp_path) == str(tmp_path / "acme" / "tiny")
    assert DeploymentConfig(model="acme/tiny", served_model_name="mine").model_name == "mine"
