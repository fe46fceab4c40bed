"""The directories of this user's running deployments, by the addresses of their gateways."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

#: What the path of a Unix socket may have (unix(7)), with its end.
_MAX_PATH = 107
_CONTROL, _ADMIN = "control", "admin"
#: Of a deployment's directory, and of the directory of its logs.
RUN_FILE = "run.json"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a deployment.

    Attributes:
        address: ``HOST:PORT`` of its gateway.
        log_dir: the directory of its logs.
        file: its deployment file, with its whole path; None: it was started without one.
    """

    address: str
    log_dir: str
    file: str | None = None

    def is_called(self, wanted: str) -> bool:
        """Whether ``wanted`` is its gateway's address or port, or its deployment file."""
        names = (self.address, self.address.rpartition(":")[2])
        return wanted in names or (self.file is not None and str(Path(wanted).resolve()) == self.file)

    def __str__(self) -> str:
        return self.address if self.file is None else f"{self.address} ({Path(self.file).name})"

    def write(self, directory: Path) -> None:
        (directory / RUN_FILE).write_bytes(msgspec.json.encode(self))


def read_run(directory: Path) -> Run | None:
    """The run whose directory this is; None where it is not known."""
    file = directory / RUN_FILE
    return msgspec.json.decode(file.read_bytes(), type=Run) if file.exists() else None


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
    def make(cls, run: Run) -> RuntimeDirectory:
        """Make the directory of a run; remove those of deployments that were killed.

        Raises AddressTaken where a deployment with this address still runs, and ValueError where other users could
        enter the directory, or it cannot be made.
        """
        root = runtime_root()
        directory = cls(root / run.address)
        if len(os.fsencode(directory.control)) > _MAX_PATH:
            raise ValueError(
                f"{directory.control} is too long for a socket; set EPD_SERVE_RUNTIME_DIR to a shorter directory"
            )
        try:
            private_root()
            if _listens(directory.control):
                raise AddressTaken(
                    f"a deployment of this user has the address {run.address}, though its gateway is not up now; "
                    "stop it, or set gateway.port to another one"
                )
            for other in root.glob("*:*"):
                control = other / _CONTROL  # one that is only about to listen has none yet
                if other == directory.path or (control.is_socket() and not _listens(control)):
                    shutil.rmtree(other, ignore_errors=True)
            directory.path.mkdir(mode=0o700, exist_ok=True)
            run.write(directory.path)
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

    @property
    def run(self) -> Run:
        found = read_run(self.path)
        assert found is not None, "it is written before the launcher listens"
        return found

    def launcher_pid(self) -> int:
        """The process that runs the deployment. Raises OSError where it has ended."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(self.control))
            pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(pid)

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
    """The address and the directory of a running deployment.

    ``wanted`` is its ``HOST:PORT``, its port or the file that it was started from. Without it the only one that
    runs, of several the one with ``preferred_port``. Raises ValueError where none, or more than one, is meant.
    """
    running = running_deployments()
    if not running:
        raise ValueError("no deployment of this user is running; start one with 'epd-serve up'")
    names = ", ".join(str(directory.run) for directory in running.values())
    if wanted is None:
        chosen = [*running]
        if len(running) > 1:
            chosen = [name for name, one in running.items() if one.run.is_called(str(preferred_port))]
    else:
        chosen = [name for name, one in running.items() if one.run.is_called(wanted)]
        if not chosen:
            raise ValueError(f"no deployment of this user is called {wanted}; those that run: {names}")
    if len(chosen) != 1:
        raise ValueError(f"several deployments are running; choose one by address or port: {names}")
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
