"""The admin plane: what operators ask and order, on an address and with a key of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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
from epd_serve.rpc.app_server import AdminHttp, serving
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.rpc.server import Handler, LinkService
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
    engine: str = "native",
) -> FastAPI:
    """``GET /instances`` and ``/requests``, ``routers`` and ``joining``, all behind ``key``.

    Without a key nobody joins here: who has proved the cluster's key does so over a link (:func:`running_admin`).
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


def _secret_required(authenticator: Authenticator, has_key: bool) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
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
    tls: TlsFiles | None = None,
    calls: Mapping[str, Handler] | None = None,
    *,
    cluster_key: str | None = None,
) -> AsyncIterator[str]:
    """Serve ``app`` while the context lasts; yields its URL. With ``tls`` callers show a certificate.

    Where there is a ``cluster_key``, ``calls`` are for those that prove it over a link.

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
    http: Any = AdminHttp
    if cluster_key is not None:
        service = LinkService(
            calls=calls or {}, key=cluster_key, service="admin", own_address=lambda: own_address, http=AdminHttp
        )
        http = service.protocol
    async with serving(NoBrowsers(app, place.host), listener, http, tls):
        logger.info("the admin plane is at %s", url)
        yield url


@asynccontextmanager
async def running_on_path(app: FastAPI, path: Path) -> AsyncIterator[None]:
    """Serve ``app`` on a Unix socket while the context lasts; a file at ``path`` is replaced.

    Whoever can enter the socket's directory can give orders. Raises ValueError where it cannot listen there.
    """
    async with serving(app, await asyncio.to_thread(_listen, path)):
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
