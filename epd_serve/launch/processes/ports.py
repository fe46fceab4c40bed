"""The ports of a deployment, checked before anything starts."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from epd_serve.config import DeploymentConfig
from epd_serve.config.vllm import PORTS_PER_INSTANCE

_TRIES = 50
_BACKLOG = 2048
#: Mooncake's transfer engines take two random ports each from 15000 to 17000.
_LOWEST = 17_001
#: The range of ports of outgoing connections.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of a deployment; ``master``: of its mooncake_master, if any, for RPC and HTTP."""

    gateway: int
    instances: tuple[int, ...]
    master: tuple[int, int] | None = None


def choose_ports(config: DeploymentConfig) -> Ports:
    """Return the ports of gateway, instances and master; free ones replace 0.

    Raises ValueError if a port is taken or an address does not belong to this machine.
    """
    gateway, admin, host = config.gateway, config.gateway.admin, config.instances.host
    base, each = config.instances.base_port, ports_each(config)
    with ExitStack() as held:  # hold each until the last is chosen, so that none is chosen twice
        gateway_port = _bind(held, gateway.host, gateway.port, 1, "gateway (gateway.port)")
        if admin.port is not None:
            _bind(held, admin.host, admin.port, 1, "admin plane (gateway.admin.port)")
        instances = tuple(
            _bind(held, host, base + index * each if base else 0, each, f"{one.name} (instances.base_port)")
            for index, one in enumerate(config.placement())
        )
        master = None
        if config.starts_master:
            rpc, http = (_bind(held, host, 0, 1, "mooncake_master") for _ in range(2))
            master = (rpc, http)
    return Ports(gateway=gateway_port, instances=instances, master=master)


def listen(host: str, port: int) -> socket.socket:
    """Return the gateway's listening socket, which successive gateways inherit. Raises ValueError."""
    with ExitStack() as held:
        listener = _bind_one(held, host, port, "gateway (gateway.port)")
        held.pop_all()
        return listener


def free_port(host: str) -> int:
    """Return a port found free a moment ago."""
    with ExitStack() as held:
        return _bind(held, host, 0, 1, "server")


def next_port(config: DeploymentConfig, taken: Collection[int], user: str) -> int:
    """Return a port for one more instance: the first free one from ``instances.base_port`` on, or any for 0.

    Raises ValueError without a free one.
    """
    host, base, each = config.instances.host, config.instances.base_port, ports_each(config)
    for port in range(base, 65536, each) if base else [0] * _TRIES:
        with suppress(ValueError), ExitStack() as held:
            chosen = _bind(held, host, port, each, user)
            if all(abs(chosen - one) >= each for one in taken):
                return chosen
    raise ValueError(f"no port on {host} is free for {user}; change instances.base_port")


def ports_each(config: DeploymentConfig) -> int:
    """Return the number of consecutive ports of an instance."""
    return PORTS_PER_INSTANCE if config.engine == "vllm" else 1


def _bind(held: ExitStack, host: str, port: int, count: int, user: str) -> int:
    """Bind ``count`` consecutive ports and return the first; ``port`` 0 draws it. Raises ValueError.

    Drawn ports are below those of outgoing connections, which could take them before the server binds.
    """
    for tries_left in range(0 if port else _TRIES, -1, -1):
        first = port or _draw(count)
        try:
            with ExitStack() as trying:
                for number in range(first, first + count):
                    _bind_one(trying, host, number, user)
                held.enter_context(trying.pop_all())
                return first
        except ValueError:
            if not tries_left:
                raise
    raise AssertionError


def _draw(count: int) -> int:
    """Draw the first of ``count`` consecutive ports."""
    try:
        end = max(int(_EPHEMERAL.read_text().split()[0]), _LOWEST + 1000)
    except (OSError, ValueError):
        end = 32768
    return random.randint(_LOWEST, end - count)


def _bind_one(held: ExitStack, host: str, port: int, user: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do, for ports closed recently
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)  # with SO_REUSEADDR, several sockets could merely bind the port
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        in_use = getattr(error, "errno", 0) == errno.EADDRINUSE
        hint = "; set another port, or 0 for any free one" if in_use else ""
        raise ValueError(f"{user} cannot listen on {host} port {port}: {reason}{hint}") from error
    return bound
