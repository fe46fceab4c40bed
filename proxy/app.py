"""The gateway as a FastAPI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from epd_serve import __version__
from epd_serve.backends.native import NativeConnections
from epd_serve.protocol.anthropic import CountTokensCall, MessagesCall
from epd_serve.protocol.openai.generation import (
    ChatCompletionRequest,
    CompletionRequest,
    VllmChatRequest,
    VllmCompletionRequest,
)
from epd_serve.protocol.openai.responses import ResponsesCall
from epd_serve.protocol.openai.tokenizing import DetokenizeBody, TokenizeBody
from epd_serve.protocol.openai.transcriptions import TranscriptionCall
from proxy.admin.plane import AdminPlane, running_admin, running_on_path
from proxy.admission import Admission
from proxy.api.dashboard import dashboard_router
from proxy.api.endpoint import GenerationEndpoint, TokenizingEndpoint
from proxy.api.routes import add_body_route
from proxy.api.views import health_router, models_router
from proxy.fleet import Fleet, connector
from proxy.gateway import Gateway
from proxy.http.asgi import LocalGuard, install_cors, install_error_handlers
from proxy.media.fetch import MediaFetcher
from proxy.media.loader import MediaLoader
from proxy.observe.observer import Observer
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)


def create_app(
    settings: GatewaySettings, instances: list[tuple[str, str]], *, switch_dir: Path | None = None
) -> FastAPI:
    """Return the gateway for ``instances``, pairs of a name and a control URL.

    ``switch_dir`` stores the roles of switched vLLM instances. ``app.state.gateway`` holds the gateway's parts,
    ``app.state.admin_url`` the URL of the admin API, if any. If a background task fails, the application calls
    ``app.state.give_up``, which the server sets.
    """
    config = settings.config
    connections = NativeConnections(settings.cluster_key, settings.tls)
    fetcher = MediaFetcher(settings)
    gateway = Gateway(
        settings=settings,
        fleet=Fleet(settings, instances, connector(config, connections, switch_dir)),
        admission=Admission(settings),
        loader=MediaLoader(settings, fetcher),
        observer=Observer(config),
    )
    plane = AdminPlane(gateway)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(connections)
            await stack.enter_async_context(fetcher)
            stack.callback(gateway.loader.close)
            if config.gateway.admin.port is not None:
                app.state.admin_url = await stack.enter_async_context(
                    running_admin(
                        plane.app(settings.admin_key),
                        config.gateway.admin,
                        settings.tls,
                        plane.calls,
                        cluster_key=settings.cluster_key,
                    )
                )
            if app.state.admin_path is not None:
                on_socket = plane.app(is_socket=True)
                await stack.enter_async_context(running_on_path(on_socket, app.state.admin_path))
            polling = asyncio.create_task(gateway.fleet.run())
            polling.add_done_callback(partial(_end_gateway, app))
            try:
                yield
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                await asyncio.to_thread(gateway.observer.close)

    app = FastAPI(
        title="epd-serve gateway",
        description="The OpenAI API for separate Encode, Prefill and Decode instances.",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
    )
    app.state.gateway = gateway
    app.state.admin_path = None
    app.state.give_up = lambda: None
    is_vllm = config.engine == "vllm"  # accept vLLM's own request fields
    for kind, path, parse in (
        ("chat", "/v1/chat/completions", (VllmChatRequest if is_vllm else ChatCompletionRequest).parse),
        ("completion", "/v1/completions", (VllmCompletionRequest if is_vllm else CompletionRequest).parse),
        ("responses", "/v1/responses", ResponsesCall.parse),
        ("messages", "/v1/messages", MessagesCall.parse),
        ("transcription", "/v1/audio/transcriptions", TranscriptionCall.parse),
    ):
        add_body_route(app, path, GenerationEndpoint(gateway, kind, parse))
    add_body_route(
        app, "/v1/responses/input_tokens", TokenizingEndpoint(gateway, "input_tokens", ResponsesCall.parse)
    )
    add_body_route(
        app, "/v1/messages/count_tokens", TokenizingEndpoint(gateway, "count_tokens", CountTokensCall.parse)
    )
    add_body_route(app, "/tokenize", TokenizingEndpoint(gateway, "tokenize", TokenizeBody.parse))
    add_body_route(app, "/detokenize", TokenizingEndpoint(gateway, "detokenize", DetokenizeBody.parse))
    app.include_router(models_router(gateway))
    app.include_router(health_router(gateway))
    app.include_router(dashboard_router(gateway))
    install_cors(app, config.gateway.cors)
    if settings.is_local and not config.gateway.api_keys:
        app.add_middleware(LocalGuard)
    install_error_handlers(app)
    return app


def _end_gateway(app: FastAPI, polling: asyncio.Future[Any]) -> None:
    """Stop a gateway whose instance polling failed; without it, the gateway's state would become stale."""
    error = None if polling.cancelled() else polling.exception()
    if isinstance(error, Exception):  # not a cancellation, which gather returns as the exception
        logger.critical("a background task failed; the gateway stops", exc_info=error)
        app.state.give_up()
