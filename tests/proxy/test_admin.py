"""The admin plane: another address, another key, and nothing of it where clients are."""

import asyncio
import socket

import pytest
from fastapi import FastAPI
from gateway_settings import admin_plane

from epd_serve.autoscale.instance_load import from_json, instance_loads
from proxy.admin.plane import running_admin

KEY = {"authorization": "Bearer admin-secret"}


async def test_operators_see_instances_and_requests_with_their_own_key(start, kit):
    admin = admin_plane(key="admin-secret")
    gateway = await start("e0:E", "p0:P", "d0:D", api_key="client-secret", admin=admin)
    url = gateway.app.state.admin_url
    assert url != gateway.url
    for headers in ({}, {"authorization": "Bearer client-secret"}):
        for path in ("/instances", "/requests"):
            async with gateway.session.get(url + path, headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
    async with gateway.session.get(f"{gateway.url}/instances", headers=KEY) as response:
        assert response.status == 404
    client = {"authorization": "Bearer client-secret"}
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    waiting = asyncio.create_task(gateway.answer(kit.chat(), headers=client))
    await gateway.until(lambda: gateway["p0"].got("/stage/prefill"))
    async with gateway.session.get(f"{url}/instances", headers=KEY) as response:
        seen = {one["name"]: one for one in (await response.json())["instances"]}
    assert set(seen) == {"e0", "p0", "d0"}
    assert seen["p0"]["role"] == "P" and seen["p0"]["ready"] and seen["p0"]["in_flight"] == {"P": 1}
    async with gateway.session.get(f"{url}/requests", headers=KEY) as response:
        requests = await response.json()
    assert (requests["running"], requests["waiting"]) == (1, 0)
    assert requests["keys"] == [{"key": "plain", "active": 1}]
    waiting.cancel()
    await gateway.settle()
    async with gateway.session.get(f"{url}/nothing", headers=KEY) as response:
        assert response.status == 404 and (await response.json())["error"]["type"] == "invalid_request_error"


async def test_autoscale_reads_load_and_reports_decisions(start):
    limits = {"ttft_ms": 9, "tpot_ms": 9}
    gateway = await start("e0:E", "p0:P", "d0:D", admin=admin_plane(), slo=limits, elastic={})
    url, session = gateway.app.state.admin_url, gateway.session
    async with session.get(f"{url}/load") as answer:
        seen = from_json((await answer.json())["instances"])
    assert [(one.name, str(one.role)) for one in seen if one.is_serving] == [("e0", "E"), ("p0", "P"), ("d0", "D")]
    assert seen == instance_loads(gateway.table)
    for kind in ("starting", "calm"):
        async with session.post(f"{url}/elastic", json={"kind": kind}) as answer:
            assert answer.status == 200
    async with session.get(f"{url}/elastic") as answer:
        assert (await answer.json())["decisions"] == [{"kind": "starting"}, {"kind": "calm"}]
    for wrong in (b"[]", b'{"reason": "' + 65536 * b"x" + b'"}'):
        async with session.post(f"{url}/elastic", data=wrong) as answer:
            assert answer.status == 400


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
async def test_web_pages_cannot_use_the_admin_plane_through_a_browser(start, address):
    gateway = await start("pd0:PD", admin=admin_plane(host=address))
    url = gateway.app.state.admin_url
    port = url.rpartition(":")[2]
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"host": f"evil.example:{port}"}):
        async with gateway.session.post(f"{url}/instances/pd0/drain", headers=headers) as response:
            assert response.status == 403
            assert (await response.json())["error"]["code"] == "cross_site"
    for host in (f"localhost:{port}", "127.0.0.1", "[::1]:1"):
        async with gateway.session.get(f"{url}/instances", headers={"host": host}) as response:
            assert response.status == 200


async def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            async with running_admin(FastAPI(), admin_plane(port=port)):
                pass
