"""No key, password, prompt or picture stands in a list of processes, a log, a trace, a page or an error."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from chat import chat, data_url
from fleet import deployed
from http_client import http_client
from own_ports import free_port
from pictures import noise, png

from epd_serve.config.keys import hash_key, new_key

SECRETS = {
    "plain": "plain-API-key-of-the-file",
    "alice": new_key()[0],
    "wrong": new_key()[0],
    "admin": "the-Admin-key-of-the-file",
    "cluster": "the-Cluster-key-of-the-file",
    "huggingface": "hf_ThisIsATokenOfHuggingFace00000",
    "password": "a-Password-within-a-URL",
}
PICTURE = data_url(png(noise(1)))
#: What no file, page or error shows, beside the keys.
PRIVATE = {"prompt": "The-prompt-about-aunt-Agatha", "picture": PICTURE[100:160]}
PAGES = ["docs", "redoc", "openapi.json", "metrics", "health", "dashboard", "v1/models", "info", "nowhere"]
PAGES += ["instances", "requests"]


async def test_secrets_are_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("admin", "cluster"):
        (tmp_path / name).write_text(SECRETS[name])
    monkeypatch.setenv("HF_TOKEN", SECRETS["huggingface"])
    shown = tmp_path / "shown"
    shown.mkdir()
    admin = free_port("127.0.0.1")
    texts: dict[str, bytes] = {}
    async with (
        deployed(
            "E-P-D",
            gateway={
                "api_keys": [{"name": name, "hash": hash_key(SECRETS[name])} for name in ("plain", "alice")],
                "admin": {"port": admin, "key": {"file": str(tmp_path / "admin")}},
                "access_log": str(shown / "access.log"),
            },
            keep_logs=True,
            cluster_key={"file": str(tmp_path / "cluster")},
            trace=shown / "trace",
        ) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        instance = deployment.instances["p0"]
        body = chat(PRIVATE["prompt"], PICTURE, max_tokens=4)
        broken = b'{"messages": [' + PRIVATE["prompt"].encode()
        hidden = chat("Hello", f"http://me:{SECRETS['password']}@127.0.0.1:1/x.png")
        headers = [
            {},
            *({"authorization": f"{scheme} {key}"} for key in SECRETS.values() for scheme in ("Bearer", "Basic")),
        ]
        answered = 0
        for number, header in enumerate(headers):
            for what, sent in (
                ("good", body),
                ("cut", body | {"messages": chat("Hi", PICTURE[:-8] + "!!!!")["messages"]}),
                ("stops", body | {"stop": [PRIVATE["prompt"]] * 20}),
                ("URL", hidden),
                ("broken", broken),
            ):
                data = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
                kind = {"content-type": "application/json"}
                answer = await client.post("/v1/chat/completions", content=data, headers=header | kind)
                answered += answer.status_code == 200
                texts[f"{what} {number}"] = answer.content
            for page in PAGES if number < 4 else ():
                for where in ("", instance.url, f"http://127.0.0.1:{admin}"):
                    url = f"{where}/{page}"
                    answer = await client.get(url, headers=header, params={"api_key": SECRETS["alice"]})
                    texts[f"{url} {number}"] = answer.content
        assert answered == 2, "with the two keys"
        for handle in deployment.instances.values():
            assert (await client.get(f"{handle.url}/info")).status_code == 401, "it serves its deployment alone"
            assert (await client.get(f"{handle.url}/health")).status_code == 200
        os.kill(instance.pid, signal.SIGKILL)
        answer = await client.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {SECRETS['alice']}"}
        )
        texts["without P"] = answer.content
        for leader in deployment.processes:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(leader.pid)
                for one in (process, *process.children(recursive=True)):
                    texts[f"command of {one.pid}"] = " ".join(one.cmdline()).encode()
    files = [path for folder in (shown, deployment.log_dir) for path in folder.rglob("*") if path.is_file()]
    assert {"access.log", "p0.log", "gateway.log"} <= {path.name for path in files}
    assert any(path.parent.name == "trace" and path.stat().st_size for path in files)
    texts |= {str(path): path.read_bytes() for path in files}
    shutil.rmtree(deployment.log_dir)
    assert not [
        (name, at)
        for at, text in texts.items()
        for name, key in (SECRETS | PRIVATE).items()
        if key.encode() in text
    ]
