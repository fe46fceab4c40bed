"""A deployment whose control calls go over TLS, and whose KV and features go over connections that open with a
proof of the cluster's key, as 'epd-serve up' runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Authority
from chat import chat
from fleet import deployed
from http_client import http_client

from epd_serve.errors import InstanceLost
from epd_serve.rpc.http import HttpPool, HttpServer
from epd_serve.rpc.tls import TlsFiles

KEY = "only-this-cluster-knows"
PICTURE = (Path(__file__).parents[2] / "docs" / "images" / "three-shapes.png").read_bytes()


async def test_answers_over_tls_are_right_and_strangers_get_none(tmp_path: Path) -> None:
    paths = Authority(tmp_path).files("ours")
    tls = {"ca": paths.ca, "cert": paths.cert, "key": paths.key}
    over = {"kv_transfer": {"transport": "tcp"}}
    async with (
        deployed("E-P-D", cluster_key=KEY, tls=tls, instances=over) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        for question, answer in (
            (chat("What color is the circle?", PICTURE), "red"),
            (chat("Where is the blue square?", PICTURE), "right"),
            (chat("What is the capital of France?"), "Paris"),
        ):
            given = await client.post("/v1/chat/completions", json=question)
            assert given.json()["choices"][0]["message"]["content"] == answer, given.text
        for instance in deployment.instances.values():
            async with HttpPool(TlsFiles(**tls)) as pool:
                live = HttpServer(instance.name, instance.url, pool).ask("GET", "/health/live")
                assert await live == b'{"status":"live"}'
            assert instance.url.startswith("https://")
            for url in (instance.url, instance.url.replace("https:", "http:")):
                async with HttpPool() as pool:
                    with pytest.raises(InstanceLost):
                        await HttpServer(instance.name, url, pool).ask("GET", "/health")
