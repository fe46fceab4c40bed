"""The gateway as a FastAPI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from epd_serve import __version__
from epd_serve.backends.base import StageCalls
from epd_serve.backends.native import NativeConnections
from epd_serve.protocol.openai.generation import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    VllmChatRequest,
    VllmCompletionRequest,
)
from epd_serve.protocol.openai.responses import ResponsesCall
from epd_serve.protocol.openai.tokenizing import DetokenizeBody, TokenizeBody
from epd_serve.protocol.openai.transcriptions import TranscriptionCall
from epd_serve.routing.routes import Router, router_of
from epd_serve.routing.table import InstanceTable
from proxy.admin.apply import instances_router, leave_router
from proxy.admin.plane import create_admin_app, running_admin, running_on_path
from proxy.admin.scaling import ServedRequests, scaling_router
from proxy.admin.switches import Switches, operations_router, switches_router
from proxy.admission.control import new_admission
from proxy.api.dashboard import dashboard_router
from proxy.api.endpoint import Endpoint, GenerationEndpoint
from proxy.api.routes import add_body_route
from proxy.api.tokenizing import TokenizingEndpoint
from proxy.api.views import health_router, home_router, models_router
from proxy.fleet.leases import LeaseCalls, Leases
from proxy.fleet.members import Members, connector, vllm_targets
from proxy.fleet.monitor import Monitor
from proxy.http.asgi import LocalGuard, install_cors, install_error_handlers
from proxy.media.fetch import MediaFetcher
from proxy.media.loader import MediaLoader
from proxy.media.probe import MediaProbe
from proxy.observe.metrics import GatewayMetrics
from proxy.observe.observer import Observer
from proxy.serving.job import Instances
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)


def create_app(
    settings: GatewaySettings,
    instances: list[tuple[str, str]],
    *,
    router: Router | None = None,
    switch_dir: Path | None = None,
) -> FastAPI:
    """The gateway for ``instances``, given as (name, control URL).

    ``switch_dir`` keeps the roles of vLLM instances that were switched.

    ``app.state.table`` is its instance table, ``app.state.admission`` its admission control,
    ``app.state.admin_url`` its admin plane, where it has one. Connections and polling live as long as the
    application's lifespan; should polling end before, ``app.state.give_up`` is called, which its server sets.
    """
    config, gateway = settings.config, settings.gateway
    engine = "vllm" if config.engine == "vllm" else "native"
    table = InstanceTable(instances)
    metrics = GatewayMetrics()
    admission = new_admission(settings)
    connections = NativeConnections(settings.cluster_key, settings.tls)
    connect = connector(connections, vllm_targets(config) if engine == "vllm" else None, switch_dir)
    calls: dict[str, StageCalls] = {name: connect(name, url) for name, url in instances}
    fetcher = MediaFetcher(settings)
    observer = Observer(config, metrics)
    served_requests = ServedRequests()
    if config.elastic is not None:
        observer.subscribe(served_requests.put)
    monitor = Monitor(table, calls, settings)
    served_by = Instances(
        table=table,
        calls=calls,
        router=router or router_of(gateway.routing),
        monitor=monitor,
        settings=settings,
    )
    switches = Switches(table, calls)
    probe = MediaProbe(settings)
    loader = MediaLoader(settings, fetcher, probe)

    health = health_router(table, metrics, monitor, admission.queue)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(connections)
            await stack.enter_async_context(fetcher)
            stack.callback(probe.close)
            routers = [
                operations_router(table, switches),
                scaling_router(table, served_requests),
                switches_router(switches),
                leave_router(switches),
            ]
            joining = LeaseCalls(leases, needs_tls=settings.tls is not None)
            if gateway.admin.port is not None:
                admin = create_admin_app(
                    table, admission, settings.admin_key, routers, joining.router, engine=engine
                )
                running = running_admin(
                    admin, gateway.admin, settings.tls, joining.calls, cluster_key=settings.cluster_key
                )
                app.state.admin_url = await stack.enter_async_context(running)
            if app.state.admin_path is not None:
                routers += [joining.router, instances_router(members), health]
                admin = create_admin_app(table, admission, None, routers, engine=engine)
                await stack.enter_async_context(running_on_path(admin, app.state.admin_path))
            polling = asyncio.gather(monitor.run(), leases.run())
            polling.add_done_callback(partial(_end_after, app))
            try:
                yield
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                await asyncio.to_thread(observer.close)

    app = FastAPI(
        title="epd-serve gateway",
        description="The OpenAI API before separate Encode, Prefill and Decode instances.",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
    )
    app.state.table = table
    app.state.monitor = monitor
    app.state.switches = switches
    app.state.admission = admission
    shared: dict[str, Any] = {
        "table": table,
        "monitor": monitor,
        "loader": loader,
        "observer": observer,
        "admission": admission,
        "settings": settings,
    }
    for path, endpoint in endpoints(served_by, shared, for_vllm=engine == "vllm"):
        add_body_route(app, path, endpoint)
    members = Members(table, calls, monitor, connect, config.topology)
    app.state.members = members
    leases = Leases(members)
    app.state.admin_path = None
    app.state.give_up = lambda: None
    app.include_router(models_router(table, monitor, admission.authenticator))
    app.include_router(health)
    app.include_router(home_router())
    app.include_router(dashboard_router(table, observer, admission, settings, members))
    install_cors(app, gateway.cors)
    if settings.is_local and not gateway.needs_key:
        app.add_middleware(LocalGuard)
    install_error_handlers(app)
    return app


def _end_after(app: FastAPI, polling: asyncio.Future[Any]) -> None:
    """End what runs beside the requests with the gateway. Where it ends by a fault, a gateway that served on
    without would know less and less of its instances: it ends, to be started again."""
    error = None if polling.cancelled() else polling.exception()
    if isinstance(error, Exception):  # else it was cancelled, which a gather passes on as what it is
        logger.critical("a part of the gateway has ended, so it ends", exc_info=error)
        app.state.give_up()


def endpoints(
    instances: Instances, shared: Mapping[str, Any], *, for_vllm: bool
) -> Iterator[tuple[str, Endpoint]]:
    """(path, endpoint) of each that takes a body; ``shared`` is what all of them are made with. ``for_vllm``:
    requests may have fields that only vLLM has."""
    chat, completion = (
        (VllmChatRequest, VllmCompletionRequest) if for_vllm else (ChatCompletionRequest, CompletionRequest)
    )
    types: dict[str, tuple[str, Callable[[bytes | bytearray], GenerationRequest]]] = {
        "/v1/chat/completions": ("chat", chat.parse),
        "/v1/completions": ("completion", completion.parse),
        "/v1/responses": ("responses", ResponsesCall.parse),
        "/v1/audio/transcriptions": ("transcription", TranscriptionCall.parse),
    }
    for path, (kind, parse) in types.items():
        yield path, GenerationEndpoint(kind=kind, parse=parse, instances=instances, **shared)
    yield (
        "/v1/responses/input_tokens",
        TokenizingEndpoint(kind="input_tokens", parse=ResponsesCall.parse, calls=instances.calls, **shared),
    )
    yield (
        "/tokenize",
        TokenizingEndpoint(kind="tokenize", parse=TokenizeBody.parse, calls=instances.calls, **shared),
    )
    yield (
        "/detokenize",
        TokenizingEndpoint(kind="detokenize", parse=DetokenizeBody.parse, calls=instances.calls, **shared),
    )
