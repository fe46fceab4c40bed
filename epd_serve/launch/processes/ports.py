"""The ports of a deployment, checked before anything starts."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from epd_serve.config import DeploymentConfig
from epd_serve.config.vllm import PORTS_PER_INSTANCE
from epd_serve.launch.processes.runtime import private_root
from epd_serve.protocol.addresses import url_of

logger = logging.getLogger(__name__)

#: Somebody listens there, or a deployment has claimed it.
_TAKEN = (errno.EADDRINUSE, errno.EWOULDBLOCK)
_TRIES = 50
_GATEWAY, _INSTANCES, _ADMIN = "gateway.port (--port)", "instances.base_port", "gateway.admin.port"
_HOST_KEYS = {_GATEWAY: "gateway.host (--host)", _INSTANCES: "instances.host", _ADMIN: "gateway.admin.host"}
#: Above those of which Mooncake's transfer engines take two each at random, 15000 to 17000.
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
    """The gateway's port and one for each instance; free ones where the deployment says 0, and for a master.

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


def claim_ports(config: DeploymentConfig, ports: Ports) -> list[int]:
    """Keep this user's other deployments from these ports: a server may need a minute until it listens.

    They are claimed until the file descriptors that this returns are closed. Raises ValueError for a port that
    another deployment has claimed.
    """
    users = [("the gateway", config.gateway.host, _GATEWAY, ports.gateway)]
    users += [
        (instance.name, config.instances.host, _INSTANCES, port)
        for instance, port in zip(config.placement(), ports.instances, strict=True)
    ]
    claims: list[int] = []
    with _claims_directory() as directory:
        if directory is None:
            return claims
        for file in directory.iterdir():
            with suppress(OSError):
                os.close(_lock(file))
                file.unlink()
        for user, host, key, port in users:
            try:
                claims.append(_lock(_claim_file(directory, host, port), create=True))
            except BlockingIOError as error:
                release(claims)
                raise _claimed(user, host, port, key) from error
            except OSError as error:  # a full disk, say
                logger.warning("%s port %d is kept for %s from its start on: %s", host, port, user, error)
    return claims


@contextmanager
def _claims_directory() -> Iterator[Path | None]:
    """The directory of this user's claims, in which nobody else claims anything in the block; None where there is
    none that is this user's alone: servers find out when they listen."""
    try:
        directory = private_root() / "ports"
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
    except (OSError, ValueError) as error:
        logger.debug("ports are not claimed: %s", error)
        yield None
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(lock)


def _claim_file(directory: Path, host: str, port: int) -> Path:
    return directory / f"{host.replace('/', ' ')} {port}"


def _lock(file: Path, *, create: bool = False) -> int:
    """A descriptor that locks a file for as long as it is open. Raises BlockingIOError where another one does."""
    descriptor = os.open(file, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _check_unclaimed(host: str, port: int, user: str, key: str) -> None:
    """Raises ValueError for a port that a deployment of this user has claimed."""
    with _claims_directory() as directory:
        if directory is not None:
            try:
                os.close(_lock(_claim_file(directory, host, port)))
            except BlockingIOError as error:
                raise _claimed(user, host, port, key) from error
            except OSError:  # there is no such file
                return


def _claimed(user: str, host: str, port: int, key: str) -> ValueError:
    return ValueError(
        f"{user} cannot listen on {host} port {port}: another deployment has it, and is starting or "
        f"stopping. Wait for it, or set {key} to another port, or to 0 for any free one"
    )


def release(claims: list[int]) -> None:
    """Release the ports that :func:`claim_ports` claimed. Idempotent."""
    while claims:
        os.close(claims.pop())


def free_port(host: str) -> int:
    """A port that was free a moment ago."""
    with ExitStack() as held:
        return _bind(held, host, 0, "a server", _INSTANCES)


def next_port(config: DeploymentConfig, taken: Collection[int], user: str) -> int:
    """A port for one more instance: the first from ``instances.base_port`` on that is free, or any for 0.

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
    if not base:
        raise ValueError(f"there is no free port for {user} on {host}; set instances.base_port")
    raise ValueError(
        f"there is no free port for {user} on {host} from {base} on; choose a lower instances.base_port"
    )


def ports_each(config: DeploymentConfig) -> int:
    """The number of ports in a row that an instance takes."""
    return PORTS_PER_INSTANCE if config.engine == "vllm" else 1


def _bind_block(held: ExitStack, host: str, port: int, count: int, user: str) -> int:
    """Bind ``count`` ports in a row and return the first; ``port`` 0 chooses them.

    A block is chosen below the ports of outgoing connections, as :func:`_bind` does.
    """
    highest = _lowest_ephemeral() - count
    for _ in range(_TRIES):
        with ExitStack() as trying:
            chosen = port or (random.randint(_LOWEST, highest) if count > 1 and highest > _LOWEST else 0)
            try:
                first = _bind(trying, host, chosen, user, _INSTANCES)
                for offset in range(1, count):
                    _bind(trying, host, first + offset, user, _INSTANCES)
            except ValueError:
                if port or count == 1:
                    raise
                continue
            held.enter_context(trying.pop_all())
            return first
    raise ValueError(f"{user} needs {count} free ports in a row on {host}; set instances.base_port")


def _lowest_ephemeral() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _bind(held: ExitStack, host: str, port: int, user: str, key: str) -> int:
    """Bind a port and return it; 0 chooses one.

    It is chosen below the ports that the host gives to other programs: its server binds it only a while later.
    """
    highest = _lowest_ephemeral() - 1
    for _ in range(_TRIES if port == 0 and highest > _LOWEST else 0):
        try:
            return _bind_one(held, host, random.randint(_LOWEST, highest), user, key)
        except ValueError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in _TAKEN):
                break
    return _bind_one(held, host, port, user, key)


def _bind_one(held: ExitStack, host: str, port: int, user: str, key: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: a recent owner is no obstacle
    try:
        bound.bind((host, port))
        bound.listen()  # with SO_REUSEADDR two that only are bound may have one port
    except (OSError, OverflowError) as error:
        raise ValueError(f"{user} cannot listen on {host} port {port}: {_remedy(error, key)}") from error
    chosen: int = bound.getsockname()[1]
    _check_unclaimed(host, chosen, user, key)  # one that is claimed is not listened on yet
    return chosen


def _remedy(error: OSError | OverflowError, key: str) -> str:
    """The reason why an address cannot be listened on, and what to write instead."""
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
    """The two parts of ``NAME=URL``. Raises ValueError for anything else."""
    name, separator, url = text.partition("=")
    if not name or not separator or not url.startswith(("http://", "https://")):
        raise ValueError(f"--instance {text}: write NAME=URL, as in e0=http://127.0.0.1:8100")
    return name, url.rstrip("/")


def instance_urls(deployment: DeploymentConfig) -> list[tuple[str, str]]:
    """Name and URL of each instance of a deployment with fixed ports. Raises ValueError where they are not."""
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
