"""The runs of this user's deployments: a directory each, with logs and the addresses of the launcher's sockets."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import msgspec

#: Runs whose logs are kept.
NUM_KEPT = 10
#: A socket's name has at most 107 bytes; "/epd-serve-XXXXXXXX/control" are 27 of them.
_MAX_TEMPORARY = 80
_RUN_FILE = "run.json"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a deployment.

    Attributes:
        address: ``HOST:PORT`` of its gateway.
        pid: the launcher's pid.
        sockets: directory of its sockets, and of files that its processes share.
        file: absolute path of its deployment file, if any.
    """

    address: str
    pid: int
    sockets: str
    file: str | None = None

    @property
    def control(self) -> Path:
        """The launcher's socket (launch/apply.py)."""
        return Path(self.sockets) / "control"

    @property
    def admin(self) -> Path:
        """The socket of the gateway's admin API; a link to the current gateway's."""
        return Path(self.sockets) / "admin"

    def is_called(self, wanted: str) -> bool:
        """Return whether ``wanted`` is its gateway's address or port, or its deployment file."""
        names = (self.address, self.address.rpartition(":")[2])
        return wanted in names or (self.file is not None and str(Path(wanted).resolve()) == self.file)

    def __str__(self) -> str:
        return self.address if self.file is None else f"{self.address} ({Path(self.file).name})"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run, locked until the run ends."""

    path: Path
    run: Run
    _lock: int

    @classmethod
    def make(cls, address: str, file: Path | None) -> RunDirectory:
        """Make a directory for a run, and remove old ones. Raises ValueError if it cannot be made."""
        try:
            log_root().mkdir(parents=True, exist_ok=True, mode=0o700)
            _prune()
            stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-"
            if len(os.fsencode(tempfile.gettempdir())) > _MAX_TEMPORARY:
                raise OSError(f"{tempfile.gettempdir()} is too long for the names of sockets")
            path = Path(tempfile.mkdtemp(prefix=stem, dir=log_root()))
            run = Run(
                address=address,
                pid=os.getpid(),
                sockets=tempfile.mkdtemp(prefix="epd-serve-"),
                file=None if file is None else str(file.resolve()),
            )
            (path / _RUN_FILE).write_bytes(msgspec.json.encode(run))
        except OSError as error:
            raise ValueError(
                f"cannot make directories for logs and sockets ({error}); set EPD_SERVE_LOG_DIR and TMPDIR to "
                "writable directories with short paths"
            ) from error
        lock = os.open(path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, run, lock)

    @property
    def sockets(self) -> Path:
        return Path(self.run.sockets)

    def close(self, *, keep_logs: bool) -> None:
        shutil.rmtree(self.sockets, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def log_root() -> Path:
    """Return ``EPD_SERVE_LOG_DIR``, or a directory below the user's state directory."""
    if own := os.environ.get("EPD_SERVE_LOG_DIR"):
        return Path(own).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "epd-serve" / "logs"


def all_runs() -> dict[Path, Run]:
    """Return the kept runs by directory, the latest first."""
    found: list[tuple[int, Path, Run]] = []
    for file in log_root().glob(f"*/{_RUN_FILE}"):
        with suppress(OSError, msgspec.DecodeError):  # just removed, or of another version
            found.append((file.stat().st_mtime_ns, file.parent, msgspec.json.decode(file.read_bytes(), type=Run)))
    return {directory: run for _, directory, run in sorted(found, key=itemgetter(0), reverse=True)}


def running() -> dict[Path, Run]:
    """Return the running deployments."""
    return {directory: run for directory, run in all_runs().items() if _is_running(directory)}


def find_run(wanted: str | None, preferred_port: int | None = None) -> tuple[Path, Run]:
    """Return a running deployment and its directory.

    ``wanted``: its ``HOST:PORT``, port or deployment file; None: the only one, or the one with ``preferred_port``.
    Raises ValueError unless exactly one fits.
    """
    found = running()
    if not found:
        raise ValueError("no deployment of this user is running; start one with 'epd-serve up'")
    names = ", ".join(map(str, found.values()))
    if wanted is not None or len(found) > 1:
        chosen = [one for one in found.items() if one[1].is_called(wanted or str(preferred_port))]
    else:
        chosen = [*found.items()]
    if not chosen and wanted is not None:
        raise ValueError(f"no running deployment of this user is called {wanted}; running: {names}")
    if len(chosen) != 1:
        raise ValueError(f"several deployments are running; name one with --deployment: {names}")
    return chosen[0]


def _is_running(directory: Path) -> bool:
    try:
        lock = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:  # removed since it was listed
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _prune() -> None:
    """Remove the sockets of ended runs, and all but the latest logs."""
    ended = [(directory, run) for directory, run in all_runs().items() if not _is_running(directory)]
    for number, (directory, run) in enumerate(ended):
        shutil.rmtree(run.sockets, ignore_errors=True)
        if number >= NUM_KEPT:
            shutil.rmtree(directory, ignore_errors=True)
