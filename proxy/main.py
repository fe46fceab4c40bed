"""Run the gateway as a process."""

from __future__ import annotations

import gc
import logging
import signal
import socket
from pathlib import Path

from epd_serve.config import DeploymentConfig
from epd_serve.config.options import directory_of
from epd_serve.rpc.sockets import raise_limit
from proxy.app import create_app
from proxy.http.server import new_server
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)

#: Allocations between two garbage collections of the youngest objects.
_GC_ALLOCATIONS = 50_000
#: Below this limit of open files the gateway warns at its start.
_FEW_FILES = 1024


def run_gateway(
    config: DeploymentConfig,
    instances: list[tuple[str, str]],
    host: str,
    port: int,
    file: Path | None = None,
    *,
    reuse_port: bool = False,
    listener: int | None = None,
    admin_path: Path | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, finish open requests and return the exit code: 1 after an internal failure.

    Open requests get ``instances.drain_s``, after SIGQUIT the full ``gateway.request_timeout_s``. Blocks; must run
    in the main thread to receive signals.

    Args:
        instances: pairs of a name and a control URL.
        file: the deployment file; switched roles are stored next to a local one.
        reuse_port: share the port with other gateways that also set this.
        listener: descriptor of a socket that already listens on the port.
        admin_path: path of the admin API's Unix socket.
    """
    logging.basicConfig(format="%(asctime)s gateway %(levelname)s %(message)s")
    most = raise_limit()
    if most < _FEW_FILES:
        logger.warning("this process may open only %d files (ulimit -n); further connections are refused", most)
    settings = GatewaySettings.of(config, host)
    app = create_app(settings, instances, switch_dir=None if file is None else directory_of(file))
    app.state.admin_path = admin_path
    server = new_server(
        app, host, port, grace_s=config.instances.drain_s, retire_s=config.gateway.request_timeout_s
    )
    # uvicorn raises the signal again after a regular stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # full collections of thousands of open requests would delay all streams
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS, 50, 100)
    sockets = None
    if listener is not None:
        sockets = [socket.socket(fileno=listener)]
    elif reuse_port:
        sockets = [_shared_socket(host, port)]
    server.run(sockets)
    return 1 if server.has_failed else 0


def _shared_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket with SO_REUSEPORT. Raises ValueError if the address is invalid or taken."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        shared = socket.socket(family, socket.SOCK_STREAM)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(address)
    except OSError as error:
        raise ValueError(f"gateway.port: cannot listen on {host} port {port}: {error.strerror}") from error
    return shared
