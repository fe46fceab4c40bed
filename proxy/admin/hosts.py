"""The part of the admin API for deployments over many hosts: the file that all agents follow, and their logs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from epd_serve.config import DeploymentConfig
from epd_serve.config.load import PLACED, placed_keys, rewrite
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.http import HttpCall, HttpPool
from proxy.admin.rollout import GatewayFiles
from proxy.settings import Current

#: For an agent's answer.
_LOGS_S = 5.0


def deployment_router(settings: Current, files: Callable[[], GatewayFiles | None]) -> APIRouter:
    """``GET /deployment``, which agents follow."""
    router = APIRouter()

    @router.get("/deployment")
    async def deployment() -> JSONResponse:
        """``keys``: topology, devices, hosts and the settings of instances as the gateway's file has them;
        ``written``: when it was, so that a file that says the same again is followed again."""
        known = files()
        written = 0 if known is None else (await asyncio.to_thread(known.file.stat)).st_mtime_ns
        return JSONResponse({"keys": placed_keys(settings.now.config), "written": written})

    return router


def hosts_router(settings: Current, files: Callable[[], GatewayFiles | None]) -> APIRouter:
    """``PUT /deployment``, ``GET /logs`` and ``GET /logs/{host}/{name}``."""
    router = APIRouter()

    @router.put("/deployment")
    async def change(request: Request) -> JSONResponse:
        """Have these keys alone of their kind in the gateway's file, and take it over."""
        _hosts(settings.now.config)
        try:
            keys = msgspec.json.decode(await request.body(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"the body is no JSON object: {error}") from error
        if others := sorted(keys.keys() - PLACED):
            raise InvalidRequest(
                f"{others[0]} is not changed from elsewhere; here are: {', '.join(sorted(PLACED))}. Change the "
                "gateway's own file"
            )
        known = files()
        if known is None:
            raise InvalidRequest("the gateway was started without a file; start it with --config")
        try:
            rewrite(known.file, {key: keys.get(key) for key in PLACED})
            known.reload()
        except (ValueError, OSError) as error:
            raise InvalidRequest(f"the gateway's file stays as it was: {error}") from error
        return JSONResponse({})

    @router.get("/logs")
    async def logs() -> JSONResponse:
        """The names of the logs on each host; in place of them, why it does not answer."""
        hosts = _hosts(settings.now.config)
        answers = await asyncio.gather(*(ask(host, "/logs") for host in hosts), return_exceptions=True)
        shown: dict[str, Any] = {}
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, (ServeError, TimeoutError)):
                shown[host] = str(answer) or f"no answer in {_LOGS_S:g} s"
            elif isinstance(answer, BaseException):
                raise answer
            else:
                shown[host] = msgspec.json.decode(answer)
        return JSONResponse({"logs": shown})

    @router.get("/logs/{host}/{name}")
    async def log(host: str, name: str, after: int = -1) -> Response:
        """A piece of one log: ``text`` from the byte ``after`` on, or its last lines, and where it ends."""
        known = _hosts(settings.now.config)
        if host not in known:
            raise InvalidRequest(f"there is no host {host[:100]!r}; there are: {', '.join(known)}", param="host")
        answer = await ask(host, f"/logs/{quote(name, safe='')}?after={after}")
        return Response(answer, media_type="application/json")

    async def ask(host: str, path: str) -> bytes:
        now = settings.now
        url = url_of(now.config.hosts[host].address, now.config.agent_port, tls=now.tls is not None)
        async with (
            HttpPool(f"agent on {host}", url, now.cluster_key, "agent", tls=now.tls) as pool,
            asyncio.timeout(_LOGS_S),
        ):
            return await HttpCall(pool, "GET", path).ask()

    return router


def _hosts(config: DeploymentConfig) -> list[str]:
    if not config.hosts:
        raise InvalidRequest("this deployment names no hosts; whoever started its instances has their logs")
    return list(config.hosts)
