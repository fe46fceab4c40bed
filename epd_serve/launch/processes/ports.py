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
from epd_serve.protocol.addresses import url_of

_TRIES = 50
_BACKLOG = 2048
_GATEWAY, _INSTANCES, _ADMIN = "gateway.port (--port)", "instances.base_port", "gateway.admin.port"
_HOST_KEYS = {_GATEWAY: "gateway.host (--host)", _INSTANCES: "instances.host", _ADMIN: "gateway.admin.host"}
#: Mooncake's transfer engines take two ports each at random from 15000 to 17000.
_LOWEST = 17_001
#: The ports that a host gives to outgoing connections, of which any may be one.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of a deployment.

    Attributes:
        master: ports of a mooncake_master and of its HTTP server, where the deployment starts one.
    """

    gateway: int
    instances: tuple[int, ...]
    master: tuple[int, int] | None = None


def choose_ports(config: DeploymentConfig) -> Ports:
    """Return the ports of gateway, instances and master; free ones where the deployment says 0.

    Raises:
        ValueError: a port is taken or lies beyond 65535, the gateway's or the admin plane's is in the range of the
            instances, or an address is none of this machine.
    """
    placement = config.placement()
    base, step = config.instances.base_port, ports_each(config)
    last = base + len(placement) * step - 1
    if base and last > 65535:
        raise ValueError(
            f"instances.base_port: {len(placement)} instances from port {base} pass 65535; choose a lower one"
        )
    admin = config.gateway.admin
    for key, port in (("gateway.port", config.gateway.port), ("gateway.admin.port", admin.port)):
        if base and port and base <= port <= last:
            raise ValueError(
                f"{key} {port} lies among the ports of the instances, {base} to {last}; "
                "choose another, or another instances.base_port"
            )
    with ExitStack() as held:  # all are held until the last is chosen, so that none is chosen twice
        gateway = _bind(held, config.gateway.host, config.gateway.port, "the gateway", _GATEWAY)
        if admin.port is not None:
            _bind(held, admin.host, admin.port, "the admin plane", _ADMIN)
        instances = tuple(
            _bind_block(held, config.instances.host, base + index * step if base else 0, step, instance.name)
            for index, instance in enumerate(placement)
        )
        master = None
        if config.starts_master:
            rpc, http = (_bind(held, config.instances.host, 0, "mooncake_master", _INSTANCES) for _ in range(2))
            master = (rpc, http)
    return Ports(gateway=gateway, instances=instances, master=master)


def listen(host: str, port: int) -> socket.socket:
    """Return the gateway's listening socket, which all gateways of a deployment inherit, one after the other.

    Raises ValueError where the address cannot be listened on.
    """
    with ExitStack() as held:
        listener = _bind_one(held, host, port, "the gateway", _GATEWAY)
        held.pop_all()
        return listener


def free_port(host: str) -> int:
    """Return a port that was free a moment ago."""
    with ExitStack() as held:
        return _bind(held, host, 0, "a server", _INSTANCES)


def next_port(config: DeploymentConfig, taken: Collection[int], user: str) -> int:
    """Return a port for one more instance: the first free one from ``instances.base_port`` on, or any for 0.

    Raises ValueError where there is none.
    """
    host, base, each = config.instances.host, config.instances.base_port, ports_each(config)
    for port in range(base, 65536, each) if base else [0] * _TRIES:
        if port and any(abs(port - one) < each for one in taken):
            continue
        with suppress(ValueError), ExitStack() as held:
            chosen = _bind_block(held, host, port, each, user)
            if all(abs(chosen - one) >= each for one in taken):
                return chosen
    raise ValueError(f"there is no free port for {user} on {host}; set instances.base_port to another one")


def ports_each(config: DeploymentConfig) -> int:
    """The number of ports in a row that an instance takes."""
    return PORTS_PER_INSTANCE if config.engine == "vllm" else 1


def _bind_block(held: ExitStack, host: str, port: int, count: int, user: str) -> int:
    """Bind ``count`` ports in a row and return the first; ``port`` 0 chooses them."""
    if count == 1:
        return _bind(held, host, port, user, _INSTANCES)
    for _ in range(_TRIES):
        with ExitStack() as trying:
            first = port or random.randint(_LOWEST, _lowest_ephemeral() - count)
            try:
                for offset in range(count):
                    _bind(trying, host, first + offset, user, _INSTANCES)
            except ValueError:
                if port:
                    raise
                continue
            held.enter_context(trying.pop_all())
            return first
    raise ValueError(f"{user} needs {count} free ports in a row on {host}; set instances.base_port")


def _bind(held: ExitStack, host: str, port: int, user: str, key: str) -> int:
    """Bind a port and return it; 0 chooses one.

    It is chosen below the ports that the host gives to other programs: its server binds it only a while later.
    """
    for _ in range(_TRIES if port == 0 else 0):
        try:
            chosen = random.randint(_LOWEST, _lowest_ephemeral() - 1)
            return int(_bind_one(held, host, chosen, user, key).getsockname()[1])
        except ValueError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE):
                break
    return int(_bind_one(held, host, port, user, key).getsockname()[1])


def _lowest_ephemeral() -> int:
    try:
        return max(int(_EPHEMERAL.read_text().split()[0]), _LOWEST + 1000)
    except (OSError, ValueError):
        return 32768


def _bind_one(held: ExitStack, host: str, port: int, user: str, key: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: a recent owner is no obstacle
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)  # with SO_REUSEADDR two that only are bound may have one port
    except (OSError, OverflowError) as error:
        raise ValueError(f"{user} cannot listen on {host} port {port}: {_remedy(error, key)}") from error
    return bound


def _remedy(error: OSError | OverflowError, key: str) -> str:
    """Return the reason why an address cannot be listened on, and what to write instead."""
    number = error.errno if isinstance(error, OSError) else None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, socket.gaierror) or number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV):
        return (
            f"{reason}. Set {_HOST_KEYS[key]} to an address of this machine: 127.0.0.1 is for clients on it, "
            "0.0.0.0 for all that reach it"
        )
    if number in (errno.EACCES, errno.EPERM):
        return f"{reason}. Set {key} to 1024 or above: lower ports are for root"
    return f"{reason}. Set {key} to another port" + ("" if key == _ADMIN else ", or to 0 for any free one")


def name_and_url(text: str) -> tuple[str, str]:
    """Return the two parts of ``NAME=URL``. Raises ValueError for anything else."""
    name, separator, url = text.partition("=")
    if not name or not separator or not url.startswith(("http://", "https://")):
        raise ValueError(f"--instance {text}: write NAME=URL, as in e0=http://127.0.0.1:8100")
    return name, url.rstrip("/")


def instance_urls(deployment: DeploymentConfig) -> list[tuple[str, str]]:
    """Return name and URL of each instance of a deployment with fixed ports. Raises ValueError for others."""
    if deployment.gateway.instances is not None:
        return list(deployment.gateway.instances.items())
    settings = deployment.instances
    tls = deployment.read_tls() is not None
    if not settings.base_port:
        raise ValueError(
            "instances.base_port is 0, so nobody knows the instances' ports; set it in the file and for 'up', "
            "or add --instance NAME=URL for each, as in e0=http://127.0.0.1:8100"
        )
    return [
        (instance.name, url_of(settings.host, settings.base_port + index * ports_each(deployment), tls=tls))
        for index, instance in enumerate(deployment.placement())
    ]
