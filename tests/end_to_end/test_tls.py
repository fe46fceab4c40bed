"""A deployment whose control calls go over TLS, and whose KV and features go over connections that open with a
proof of the cluster's key, as 'epd-serve up' runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from chat import chat
from fleet import deployed
from http_client import http_client
from pictures import noise

from epd_serve.errors import InstanceLost
from epd_serve.rpc.http import HttpPool, HttpServer
from epd_serve.rpc.tls import TlsFiles

KEY = "only-this-cluster-knows"


async def _answers(topology: str, **settings: Any) -> list[str]:
    """A picture is asked about twice, and a text; the instances' servers are tried from outside, too."""
    picture = chat("What is this?", noise(1), max_tokens=6, ignore_eos=True, temperature=0)
    text = chat("Count to 9.", max_tokens=12, ignore_eos=True, temperature=0)
    answers = []
    async with deployed(topology, **settings) as deployment, http_client() as client:
        for body in (picture, picture, text):
            answer = await client.post(f"{deployment.gateway_url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["message"]["content"])
        if "tls" in settings:
            files = TlsFiles(**settings["tls"])
            for instance in deployment.instances.values():
                async with HttpPool(files) as pool:
                    live = HttpServer(instance.name, instance.url, pool).ask("GET", "/health/live")
                    assert await live == b'{"status":"live"}'
                assert instance.url.startswith("https://")
                for url in (instance.url, instance.url.replace("https:", "http:")):
                    async with HttpPool() as pool:
                        with pytest.raises(InstanceLost):
                            await HttpServer(instance.name, url, pool).ask("GET", "/health")
    return answers


async def test_answers_over_tls_are_those_of_one_instance(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("ours")
    tls = {"ca": files.ca, "cert": files.cert, "key": files.key}
    over = {"kv_transfer": {"transport": "tcp"}}
    alone = await _answers("EPD")
    assert await _answers("E-P-D", cluster_key=KEY, tls=tls, instances=over) == alone
