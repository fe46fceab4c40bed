"""The gateway as a process."""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from types import FrameType

from epd_serve.config import DeploymentConfig
from epd_serve.config.role_files import directory_of
from epd_serve.rpc.descriptors import FEW, raise_limit
from proxy.app import create_app
from proxy.http.server import new_server
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)


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
    """Serve until SIGTERM or SIGINT, finish what is in progress (``instances.drain_s``) and return the exit
    code: 0, or 1 where a part of the gateway has failed. After SIGQUIT requests take as long as they may at all.

    Blocks; must run in the main thread, for the signals.

    Args:
        instances: (name, control URL).
        file: the deployment file, which tells a gateway of a local deployment where roles are kept.
        reuse_port: other gateways that say so, too, may listen on the port beside it.
        listener: descriptor of a socket that listens on the port already; None: there is none.
        admin_path: of the Unix socket of its admin API.
    """
    logging.basicConfig(format="%(asctime)s gateway %(levelname)s %(message)s")
    most = raise_limit()
    if most < FEW:
        logger.warning(
            "this process may have %d files open (ulimit -n): connections beyond that are refused", most
        )
    settings = GatewaySettings.of(config, host)
    app = create_app(settings, instances, switch_dir=None if file is None else directory_of(file))
    app.state.admin_path = admin_path
    server = new_server(
        app, host, port, grace_s=config.instances.drain_s, retire_s=config.gateway.request_timeout_s
    )
    # uvicorn raises the signal that stopped it again when it is done; for us that is the regular end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_quietly)
    sockets = None
    if listener is not None:
        sockets = [socket.socket(fileno=listener)]
    elif reuse_port:
        sockets = [_shared_socket(host, port)]
    server.run(sockets)
    return 1 if server.has_failed else 0


def _shared_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket among which and those of other gateways the kernel spreads connections.

    Raises ValueError where the address cannot be used, or a process that does not share it has it.
    """
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        shared = socket.socket(family, socket.SOCK_STREAM)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(address)
    except OSError as error:
        raise ValueError(f"gateway.port: cannot listen on {host} port {port}: {error.strerror}") from error
    return shared


def _stop_quietly(_: int, __: FrameType | None) -> None:
    """Nothing is left to do: uvicorn's own handler has stopped the server."""
