"""The admin plane: what operators ask and order, on an address and with a key of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse

from epd_serve.config.gateway import AdminConfig
from epd_serve.config.keys import ADMIN_KEY, hash_key
from epd_serve.errors import ServeError
from epd_serve.protocol.addresses import NoBrowsers, url_of
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.rpc.app_server import LinkedHttp, serving
from epd_serve.rpc.cluster import CLUSTER_KEY, ClusterLinks, is_proved
from epd_serve.rpc.sockets import watch_accepted
from epd_serve.rpc.tls import TlsFiles
from proxy.admission.control import AdmissionControl
from proxy.admission.keys import Authenticator, Client
from proxy.api.views import key_required
from proxy.http.asgi import install_error_handlers

logger = logging.getLogger(__name__)


def create_admin_app(
    table: InstanceTable,
    admission: AdmissionControl,
    key: str | None,
    routers: Sequence[APIRouter] = (),
    joining: APIRouter | None = None,
    *,
    orders: Sequence[APIRouter] = (),
    engine: str = "native",
) -> FastAPI:
    """``GET /instances`` and ``/requests``, and ``routers``, all behind ``key``.

    ``orders`` and ``joining`` are for those that have proved the cluster's key, too: they could give these orders
    to the instances themselves. Nobody joins where there is neither of the two.
    """
    admin = [] if key is None else [(hash_key(key), Client("admin"))]
    router = APIRouter()

    @router.get("/instances")
    async def instances() -> JSONResponse:
        """Every instance as the gateway sees it."""
        return JSONResponse({"engine": engine, "instances": [_describe(record) for record in table]})

    @router.get("/requests")
    async def requests() -> JSONResponse:
        """Count who runs and who waits, in all and for each API key."""
        queue = admission.queue
        keys = [{"key": one.name, "active": one.num_active} for one in admission.authenticator.clients]
        shown = {"running": queue.num_running, "waiting": queue.num_waiting}
        return JSONResponse({**shown, "keys": keys})

    app = FastAPI(title="epd-serve admin", openapi_url=None)
    for one in (router, *routers):
        app.include_router(one, dependencies=[Depends(key_required(Authenticator(admin)))])
    for one in orders:
        app.include_router(one, dependencies=[Depends(_proof_or_key(Authenticator(admin)))])
    if joining is not None:
        required = _secret_required(Authenticator(admin), bool(admin))
        app.include_router(joining, dependencies=[Depends(required)])
    install_error_handlers(app)
    return app


class SecretRequired(ServeError):
    """Somebody who has proved nothing asks for what is not for everybody."""

    status: ClassVar[int] = 403
    type: ClassVar[str] = "permission_error"
    default_code: ClassVar[str | None] = "secret_required"


def _proof_or_key(authenticator: Authenticator) -> Callable[[Request], Awaitable[None]]:
    check_key = key_required(authenticator)

    async def check(request: Request) -> None:
        if not is_proved(request.scope):
            await check_key(request)

    return check


def _secret_required(authenticator: Authenticator, has_key: bool) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if is_proved(request.scope):
            return
        if not has_key:
            raise SecretRequired(
                f"who joins gets prompts, so it must have a secret: set cluster_key in the deployment file, and "
                f"{CLUSTER_KEY} where the instance is started, or gateway.admin.key and {ADMIN_KEY}"
            )
        authenticator.check(request.headers.get("authorization"))

    return check


def _describe(record: InstanceRecord) -> dict[str, Any]:
    info = record.info
    return {
        "name": record.name,
        "url": record.url,
        "role": str(record.role) if record.role else None,
        "ready": record.ready,
        "in_flight": {stage.value: count for stage, count in record.in_flight.items() if count},
        "device": info.device if info else None,
        "budgets": info.budgets if info else {},
        "load": msgspec.to_builtins(info.load) if info else None,
    }


@asynccontextmanager
async def running_admin(
    app: FastAPI,
    place: AdminConfig,
    cluster_key: str | None = None,
    tls: TlsFiles | None = None,
) -> AsyncIterator[str]:
    """Serve ``app`` while the context lasts; yields its URL. Callers may prove ``cluster_key`` there; with ``tls``
    they show a certificate.

    Raises ValueError where the port is taken.
    """
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        listener = socket.create_server((place.host, place.port or 0), family=family)
    except OSError as error:
        raise ValueError(
            f"gateway.admin: cannot listen on {place.host}:{place.port}: {error.strerror or error}"
        ) from error
    watch_accepted(listener)
    url = url_of(place.host, listener.getsockname()[1], tls=tls is not None)
    own_address = urlsplit(url).netloc
    linked = app if cluster_key is None else ClusterLinks(app, cluster_key, "admin", lambda: own_address)
    async with serving(NoBrowsers(linked, place.host), listener, _AdminHttp, tls):
        logger.info("the admin plane is at %s", url)
        yield url


@asynccontextmanager
async def running_on_path(app: FastAPI, path: Path) -> AsyncIterator[None]:
    """Serve ``app`` on a Unix socket while the context lasts; a file at ``path`` is replaced.

    Whoever can enter the socket's directory can give orders. Raises ValueError where it cannot listen there.
    """
    async with serving(app, await asyncio.to_thread(_listen, path), _AdminHttp):
        yield


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"the admin API cannot listen at {path}: {error.strerror or error}") from error
    return listener


class _AdminHttp(LinkedHttp):
    """Also knows whose connection it is."""
