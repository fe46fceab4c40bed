"""The admin API for operators, the launcher and autoscale, with its own key."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_serve.autoscale.instance_load import instance_loads, to_json
from epd_serve.config.gateway import AdminConfig, InstanceName, InstanceUrl
from epd_serve.config.keys import ADMIN_KEY, hash_key
from epd_serve.config.sections import RoleName
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.protocol.addresses import NoBrowsers, url_of
from epd_serve.protocol.instance_state import LeaveOrder, RoleOrder
from epd_serve.routing.table import InstanceRecord
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.rpc.server import AdminHttp, Handler, LinkService, Reply, serve_app
from epd_serve.rpc.sockets import listen, watch_accepted
from epd_serve.rpc.tls import TlsFiles
from epd_serve.topology import parse_topology
from proxy.admin.switches import Switches
from proxy.admission import Authenticator, Holder
from proxy.api.views import health_router, key_required
from proxy.fleet import Member
from proxy.gateway import Gateway
from proxy.http.asgi import install_error_handlers
from proxy.observe.access_log import line_of
from proxy.observe.record import RequestRecord

logger = logging.getLogger(__name__)

_OPERATOR = "operator"
_NUM_DECISIONS = 500
_MAX_DECISION_BYTES = 64 * 1024
#: More requests than are served between two polls of autoscale.
_NUM_REQUESTS = 4096


class JoinBody(BaseModel):
    """The body of ``POST /instances``."""

    model_config = ConfigDict(extra="forbid")

    name: InstanceName
    url: InstanceUrl
    lease_s: float = Field(default=10.0, ge=1, le=3600)
    #: For a vLLM instance that the topology does not name.
    role: RoleName | None = None
    #: The larger number wins between instances of one name; 0 means unnumbered.
    incarnation: int = Field(default=0, ge=0, lt=1 << 63)


class InstancesBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``PUT /instances``: all instances of the deployment by name."""

    topology: str
    instances: dict[str, Member]


class SecretRequired(ServeError):
    """The order needs a key or proof of the cluster key."""

    status: ClassVar[int] = 403
    type: ClassVar[str] = "permission_error"
    default_code: ClassVar[str | None] = "secret_required"


class AdminPlane:
    """Handlers of the admin API. Keeps the latest finished requests for autoscale."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._switches = Switches(gateway.fleet)
        self._decisions: deque[dict[str, Any]] = deque(maxlen=_NUM_DECISIONS)
        self._served: deque[bytes] = deque(maxlen=_NUM_REQUESTS)  # as lines of the access log
        self._num_served = 0
        if gateway.settings.config.elastic is not None:
            gateway.observer.subscribe(self._keep_request)

    @property
    def calls(self) -> dict[str, Handler]:
        """Calls over a link, whose peer has proved the cluster key."""
        return {"/join": self._join_by_link, "/leave": self._leave_by_link}

    def app(self, key: str | None = None, *, is_socket: bool = False) -> FastAPI:
        """Return the application behind ``key``.

        Without a key, instances join only over a link, because an instance receives prompts. On a Unix socket
        (``is_socket``) its directory's permissions protect it, and any caller may add instances.
        """
        authenticator = Authenticator([] if key is None else [(hash_key(key), Holder("admin"))])
        check_key = key_required(authenticator)

        async def check_secret(request: Request) -> None:
            if key is None and not is_socket:
                raise SecretRequired(
                    "an instance receives prompts, so joining needs a secret: set cluster_key in the deployment "
                    f"file and {CLUSTER_KEY} for the instance, or gateway.admin.key and {ADMIN_KEY}"
                )
            await check_key(request)

        app = FastAPI(title="epd-serve admin", openapi_url=None)

        def add(method: str, path: str, answer: Callable[..., Any], check: Any = check_key) -> None:
            app.add_api_route(path, answer, methods=[method], dependencies=[Depends(check)])

        add("GET", "/instances", self._show_instances)
        add("GET", "/requests", self._show_requests)
        add("GET", "/requests/served", self._show_served)
        add("GET", "/load", self._show_load)
        add("GET", "/elastic", self._show_decisions)
        add("POST", "/elastic", self._note_decision)
        add("POST", "/admin/instances/{name}/drain", self._drain)
        add("POST", "/admin/instances/{name}/undrain", self._undrain)
        add("POST", "/instances/{name}/role", self._switch)
        add("POST", "/instances/{name}/leave", self._empty)
        add("POST", "/instances", self._join, check_secret)
        add("DELETE", "/instances/{name}", self._leave, check_secret)
        if is_socket:
            add("PUT", "/instances", self._replace)
            app.include_router(health_router(self._gateway))
        install_error_handlers(app)
        return app

    # ------------------------------------------------------------------ operators

    async def _show_instances(self) -> JSONResponse:
        engine = "vllm" if self._gateway.settings.config.engine == "vllm" else "native"
        instances = [_describe(record) for record in self._gateway.fleet.table]
        fleet = self._gateway.fleet
        shown = {"topology": fleet.layout(), "models": [*fleet.table.models()], "engine": engine}
        return JSONResponse({**shown, "instances": instances})

    async def _show_requests(self) -> JSONResponse:
        """Count running and waiting requests, in total and per API key."""
        queue, holders = self._gateway.admission.queue, self._gateway.admission.authenticator.holders
        keys = [{"key": one.name, "active": one.num_active} for one in holders]
        return JSONResponse({"running": queue.num_running, "waiting": queue.num_waiting, "keys": keys})

    async def _drain(self, name: str) -> JSONResponse:
        """Send an instance no new requests; it is idle when ``in_flight`` is empty."""
        record = self._switches.find(name)
        record.drains.add(_OPERATOR)
        return JSONResponse(_describe(record))

    async def _undrain(self, name: str) -> JSONResponse:
        record = self._switches.find(name)
        record.drains.discard(_OPERATOR)
        return JSONResponse(_describe(record))

    async def _switch(self, name: str, request: Request) -> JSONResponse:
        """Answer when the instance serves the role; ordering its current role cancels a switch."""
        changed = await self._switches.order(name, _decoded(await request.body(), RoleOrder))
        times = {"seconds": changed.seconds, "drain_s": changed.drain_s}
        return JSONResponse({"instance": name, "from": changed.old, "to": changed.new, **times})

    async def _empty(self, name: str, request: Request) -> JSONResponse:
        """Answer when the instance is empty."""
        seconds = await self._switches.leave(name, _decoded(await request.body(), LeaveOrder))
        return JSONResponse({"instance": name, "seconds": seconds})

    # ------------------------------------------------------------------ membership

    async def _replace(self, request: Request) -> JSONResponse:
        """Replace the instances of the deployment; instances that joined by themselves stay."""
        body = _decoded(await request.body(), InstancesBody)
        self._gateway.fleet.replace(body.instances, parse_topology(body.topology))
        return JSONResponse({})

    async def _join(self, request: Request) -> JSONResponse:
        """Add an instance (201) or renew its lease."""
        body, is_new = self._read_join(await request.body())
        return JSONResponse({"name": body.name, "lease_s": body.lease_s}, status_code=201 if is_new else 200)

    async def _leave(self, name: str, incarnation: int = 0) -> JSONResponse:
        """Remove an instance; with ``incarnation`` only that one, not its successor of the same name."""
        self._gateway.fleet.leave(name, incarnation)
        return JSONResponse({"name": name})

    def _read_join(self, data: bytes) -> tuple[JoinBody, bool]:
        body = _read_lease(data)
        if self._gateway.settings.tls is not None and not body.url.startswith("https://"):
            raise InvalidRequest(
                f"url: {body.url} is not https; this deployment uses tls, so start the instance with tls too",
                param="url",
            )
        name, role, incarnation = body.name, body.role, body.incarnation
        return body, self._gateway.fleet.join(name, body.url, body.lease_s, role=role, incarnation=incarnation)

    async def _join_by_link(self, body: bytes) -> Reply:
        self._read_join(body)
        return Reply()

    async def _leave_by_link(self, body: bytes) -> Reply:
        lease = _read_lease(body)
        self._gateway.fleet.leave(lease.name, lease.incarnation)
        return Reply()

    # ------------------------------------------------------------------ autoscale

    def _keep_request(self, record: RequestRecord) -> None:
        self._num_served += 1
        self._served.append(msgspec.json.encode(line_of(record)))

    async def _show_load(self) -> JSONResponse:
        """Return each instance's seconds of pending work, and image tokens per pixel."""
        table = self._gateway.fleet.table
        tokens = max((one.info.tokens_per_pixel for one in table if one.info is not None), default=0.0)
        return JSONResponse({"instances": to_json(instance_loads(table)), "tokens_per_pixel": tokens})

    async def _show_served(self, after: int = 0) -> Response:
        """Return the access log lines after number ``after`` and the number of the last one.

        An unknown number returns all. Lines are kept only if the deployment has the section ``elastic``.
        """
        num_new = self._num_served - (after if after <= self._num_served else 0)
        lines = list(self._served)[max(0, len(self._served) - num_new) :]
        content = {"last": self._num_served, "requests": [msgspec.Raw(line) for line in lines]}
        return Response(msgspec.json.encode(content), media_type="application/json")

    async def _show_decisions(self) -> JSONResponse:
        """Return the decisions that ``epd-serve autoscale`` reported to this gateway, newest last."""
        return JSONResponse({"decisions": list(self._decisions)})

    async def _note_decision(self, request: Request) -> JSONResponse:
        body = await request.body()
        if len(body) > _MAX_DECISION_BYTES:
            raise InvalidRequest(f"a decision has at most {_MAX_DECISION_BYTES} bytes")
        self._decisions.append(_decoded(body, dict[str, Any]))
        return JSONResponse({})


def _describe(record: InstanceRecord) -> dict[str, Any]:
    info = record.info
    return {
        "name": record.name,
        "url": record.url,
        "role": str(record.role) if record.role else None,
        "ready": record.ready,
        "state": record.state,
        "draining": bool(record.drains),
        "in_flight": {stage.value: count for stage, count in record.in_flight.items() if count},
        "device": info.device if info else None,
        "pid": info.pid if info and info.usage else None,
        "restarts": record.num_restarts,
        "memory_bytes": info.usage.memory_bytes if info and info.usage else None,
        "budgets": info.budgets if info else {},
        "load": msgspec.to_builtins(info.load) if info else None,
    }


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:  # also invalid UTF-8
        raise InvalidRequest(f"the body is not a valid {kind.__name__}: {error}") from error


def _read_lease(body: bytes) -> JoinBody:
    try:
        return JoinBody.model_validate_json(bytes(body))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "body"
        raise InvalidRequest(
            f'{where}: {fault["msg"]}; write {{"name": "d7", "url": "http://10.0.0.7:8100", "lease_s": 10}}',
            param=where,
        ) from error


@asynccontextmanager
async def running_admin(
    app: FastAPI,
    place: AdminConfig,
    tls: TlsFiles | None = None,
    calls: Mapping[str, Handler] | None = None,
    *,
    cluster_key: str | None = None,
) -> AsyncIterator[str]:
    """Serve ``app`` and yield its URL. With ``tls`` callers need a certificate.

    With a ``cluster_key``, peers that prove it over a link can make ``calls``. Raises ValueError if the port is
    taken.
    """
    listener = listen(place.host, place.port or 0, "admin plane (gateway.admin.port)")
    watch_accepted(listener)
    url = url_of(place.host, listener.getsockname()[1], tls=tls is not None)
    own_address = urlsplit(url).netloc
    http: Any = AdminHttp
    if cluster_key is not None:
        service = LinkService(
            calls=calls or {}, key=cluster_key, service="admin", own_address=lambda: own_address, http=AdminHttp
        )
        http = service.protocol
    async with serve_app(NoBrowsers(app, place.host), listener, http, tls):
        logger.info("admin API at %s", url)
        yield url


@asynccontextmanager
async def running_on_path(app: FastAPI, path: Path) -> AsyncIterator[None]:
    """Serve ``app`` on a Unix socket, which replaces any file at ``path``.

    Anyone who can enter the socket's directory can give orders. Raises ValueError if it cannot listen there.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        await asyncio.to_thread(path.unlink, missing_ok=True)
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"the admin API cannot listen at {path}: {error.strerror or error}") from error
    async with serve_app(app, listener):
        yield
