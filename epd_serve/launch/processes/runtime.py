"""The directories of this user's running deployments, by the addresses of their gateways."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from epd_serve.config import load_config

#: What the path of a Unix socket may have (unix(7)), with its end.
_MAX_PATH = 107
_CONTROL, _ADMIN = "control", "admin"


def runtime_root() -> Path:
    """The directory of all deployments of this user: ``EPD_SERVE_RUNTIME_DIR``, or one in that of the session."""
    if own := os.environ.get("EPD_SERVE_RUNTIME_DIR"):
        return Path(own)
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK):
        return Path(session) / "epd-serve"
    return Path("/tmp") / f"epd-serve-{os.getuid()}"


def private_root() -> Path:
    """:func:`runtime_root`, made. Raises ValueError where it cannot be, or other users could enter it."""
    root = runtime_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(root)
    except OSError as error:
        raise ValueError(f"{root}: {error.strerror}; set EPD_SERVE_RUNTIME_DIR to another directory") from error
    return root


class AddressTaken(ValueError):
    """Another running deployment has this address."""


@dataclass(frozen=True, slots=True)
class RuntimeDirectory:
    """The directory of one deployment, with its sockets."""

    path: Path

    @classmethod
    def make(cls, host: str, port: int) -> RuntimeDirectory:
        """Make the directory for a gateway that listens there; remove those of deployments that were killed.

        Raises AddressTaken where a deployment with this address still runs, and ValueError where other users could
        enter the directory, or it cannot be made.
        """
        root = runtime_root()
        directory = cls(root / f"{host}:{port}")
        if len(os.fsencode(directory.control)) > _MAX_PATH:
            raise ValueError(
                f"{directory.control} is too long for a socket; set EPD_SERVE_RUNTIME_DIR to a shorter directory"
            )
        try:
            private_root()
            if _listens(directory.control):
                raise AddressTaken(
                    f"a deployment of this user has {host} port {port}, though its gateway is not up just now; "
                    "stop it, or set gateway.port to another one"
                )
            for other in root.glob("*:*"):
                control = other / _CONTROL  # one that is only about to listen has none yet
                if other == directory.path or (control.is_socket() and not _listens(control)):
                    shutil.rmtree(other, ignore_errors=True)
            directory.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{root}: {error.strerror}; set EPD_SERVE_RUNTIME_DIR to another directory"
            ) from error
        return directory

    @property
    def control(self) -> Path:
        """The launcher's socket (launch/control.py)."""
        return self.path / _CONTROL

    @property
    def admin(self) -> Path:
        """The socket of the gateway's admin API (proxy/admin/plane.py)."""
        return self.path / _ADMIN

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def running_deployments() -> dict[str, RuntimeDirectory]:
    """The deployments by the addresses of their gateways; those of launchers that are gone are left out."""
    root = runtime_root()
    if root.exists():
        _check_private(root)
    found = sorted(root.iterdir()) if root.is_dir() else []
    return {one.name: RuntimeDirectory(one) for one in found if _listens(one / _CONTROL)}


def find_deployment(wanted: str | None, preferred_port: int | None = None) -> tuple[str, RuntimeDirectory]:
    """Address and directory of a deployment: ``wanted`` is ``HOST:PORT``, a port or a deployment file.

    Without it the only one that runs, or the one with ``preferred_port``. Raises ValueError where none is meant.
    """
    if wanted is not None and Path(wanted).is_file():
        wanted = str(load_config(Path(wanted)).gateway.port)
    running = running_deployments()
    if not running:
        raise ValueError("no deployment of this user is running; start one with 'epd-serve up'")
    ports = {name: name.rpartition(":")[2] for name in running}
    names = ", ".join(running)
    if wanted is not None:
        chosen = [name for name in running if wanted in (name, ports[name])]
        if len(chosen) != 1:
            raise ValueError(f"no deployment of this user runs at {wanted}; those that run: {names}")
    elif len(running) == 1:
        chosen = list(running)
    else:
        chosen = [name for name in running if ports[name] == str(preferred_port)]
        if len(chosen) != 1:
            raise ValueError(f"several deployments are running; choose one with --deployment: {names}")
    return chosen[0], running[chosen[0]]


def _check_private(root: Path) -> None:
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(
            f"{root} must be a directory that its owner alone can enter; set EPD_SERVE_RUNTIME_DIR to another"
        )


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as trying:
        try:
            trying.connect(str(path))
        except OSError:
            return False
        return True
