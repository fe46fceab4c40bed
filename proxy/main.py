"""The gateway as a process."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from epd_serve.config import DeploymentConfig
from epd_serve.config.role_files import directory_of
from epd_serve.rpc.descriptors import FEW, raise_limit
from proxy.admin.reload import Reloader
from proxy.admin.rollout import GatewayFiles
from proxy.app import create_app
from proxy.http.server import new_server
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reread:
    """The source of a configuration: ``read`` gives what ``file`` says now, ``instances`` those that it has;
    both may raise ValueError."""

    read: Callable[[], DeploymentConfig]
    file: Path
    instances: Callable[[DeploymentConfig], list[tuple[str, str]]]


def run_gateway(
    config: DeploymentConfig,
    instances: list[tuple[str, str]],
    host: str,
    port: int,
    reread: Reread | None = None,
    *,
    reuse_port: bool = False,
    admin_path: Path | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then finish what is in progress (``gateway.shutdown_grace_s``) and return the
    exit code: 0, or 1 where a part of it has failed.

    Blocks; must run in the main thread, for the signals. ``instances`` are (name, control URL). With ``reread``,
    SIGHUP or a change of the file makes the gateway take it over. ``reuse_port``: other gateways that say so, too,
    may listen on the port beside it. ``admin_path``: of the Unix socket of its admin API.
    """
    logging.basicConfig(format="%(asctime)s gateway %(levelname)s %(message)s")
    most = raise_limit()
    if most < FEW:
        logger.warning(
            "this process may have %d files open (ulimit -n): connections beyond that are refused", most
        )
    settings = GatewaySettings.of(config, host)
    switch_dir = None if reread is None else directory_of(reread.file)
    app = create_app(settings, instances, switch_dir=switch_dir)
    app.state.admin_path = admin_path
    if reread is not None:

        def apply() -> None:
            config = reread.read()
            changed = GatewaySettings.of(config, host)
            instances = reread.instances(config)
            app.state.control.apply(changed, instances)

        def left_by(config: DeploymentConfig) -> list[str]:
            changed = GatewaySettings.of(config, host)
            return app.state.control.left_by(changed)  # type: ignore[no-any-return]

        app.state.reloader = Reloader(reread.file, apply)
        app.state.files = GatewayFiles(reread.file, app.state.reloader.take, left_by)
    server = new_server(app, host, port, grace_s=config.gateway.shutdown_grace_s)
    # uvicorn raises the signal that stopped it again when it is done; for us that is the regular end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_quietly)
    server.run([_shared_socket(host, port)] if reuse_port else None)
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
