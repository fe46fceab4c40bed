"""The ports of a deployment, checked before anything starts."""

from __future__ import annotations

import random
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from epd_serve.config import DeploymentConfig
from epd_serve.config.vllm import PORTS_PER_INSTANCE
from epd_serve.rpc.sockets import listen

_TRIES = 50
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


def choose_ports(config: DeploymentConfig, *, check: bool = True) -> Ports:
    """Return the ports of gateway, instances and master; free ones replace 0.

    Raises ValueError if a port is taken or an address does not belong to this machine; without ``check`` only for
    ports that replace 0.
    """
    gateway, admin, host = config.gateway, config.gateway.admin, config.instances.host
    base, each = config.instances.base_port, ports_each(config)
    with ExitStack() as held:  # hold each until the last is chosen, so that none is chosen twice
        gateway_port = _hold(held, gateway.host, gateway.port, "gateway (gateway.port)", check=check)
        if admin.port is not None:
            _hold(held, admin.host, admin.port, "admin plane (gateway.admin.port)", check=check)
        instances = tuple(
            _hold(
                held,
                host,
                base + index * each if base else 0,
                f"{one.name} (instances.base_port)",
                each,
                check=check,
            )
            for index, one in enumerate(config.placement())
        )
        master = None
        if config.starts_master:
            master = (_hold(held, host, 0, "mooncake_master"), _hold(held, host, 0, "mooncake_master"))
    return Ports(gateway=gateway_port, instances=instances, master=master)


def next_port(config: DeploymentConfig, taken: Collection[int], user: str) -> int:
    """Return a port for one more instance: the first free one from ``instances.base_port`` on, or any for 0.

    Raises ValueError without a free one.
    """
    host, base, each = config.instances.host, config.instances.base_port, ports_each(config)
    for port in range(base, 65536, each) if base else [0] * _TRIES:
        with suppress(ValueError), ExitStack() as held:
            chosen = _hold(held, host, port, user, each)
            if all(abs(chosen - one) >= each for one in taken):
                return chosen
    raise ValueError(f"no port on {host} is free for {user}; change instances.base_port")


def ports_each(config: DeploymentConfig) -> int:
    """Return the number of consecutive ports of an instance."""
    return PORTS_PER_INSTANCE if config.engine == "vllm" else 1


def _hold(held: ExitStack, host: str, port: int, user: str, count: int = 1, *, check: bool = True) -> int:
    """Listen on ``count`` consecutive ports and return the first; ``port`` 0 draws it. Raises ValueError.

    Without ``check``, a given port is returned as it is.
    """
    if port and not check:
        return port
    for tries_left in range(0 if port else _TRIES, -1, -1):
        first = port or draw_port(count)
        try:
            with ExitStack() as trying:
                for number in range(first, first + count):
                    trying.enter_context(listen(host, number, user))
                held.enter_context(trying.pop_all())
                return first
        except ValueError:
            if not tries_left:
                raise
    raise AssertionError


def draw_port(count: int) -> int:
    """Draw the first of ``count`` consecutive ports.

    They are below those of outgoing connections, which could take them before the server listens.
    """
    try:
        end = max(int(_EPHEMERAL.read_text().split()[0]), _LOWEST + 1000)
    except (OSError, ValueError):
        end = 32768
    return random.randint(_LOWEST, end - count)
