"""The runs of this user's deployments: a directory each, with logs and the addresses of the launcher's sockets."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec

#: Runs whose logs are kept.
NUM_KEPT = 10
#: A socket's name has at most 107 bytes; "/epd-serve-XXXXXXXX/control" are 27 of them.
_MAX_TEMPORARY = 80
_RUN_FILE = "run.json"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a deployment, from :meth:`begin` to :meth:`end`.

    Attributes:
        address: ``HOST:PORT`` of its gateway.
        pid: the launcher's pid.
        logs: its directory.
        sockets: directory of its sockets, and of files that its processes share.
        file: absolute path of its deployment file, if any.
    """

    address: str
    pid: int
    logs: str
    sockets: str
    file: str | None = None

    @classmethod
    def begin(cls, address: str, file: Path | None) -> tuple[Run, int]:
        """Make the directories of a run, and remove old ones.

        Return the run and a descriptor that locks its directory. Raises ValueError if they cannot be made.
        """
        try:
            log_root().mkdir(parents=True, exist_ok=True, mode=0o700)
            for number, old in enumerate(run for run in all_runs() if not run.lasts):
                shutil.rmtree(old.sockets, ignore_errors=True)
                if number >= NUM_KEPT:
                    shutil.rmtree(old.logs, ignore_errors=True)
            if len(os.fsencode(tempfile.gettempdir())) > _MAX_TEMPORARY:
                raise OSError(f"{tempfile.gettempdir()} is too long for the names of sockets")
            stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-"
            run = cls(
                address=address,
                pid=os.getpid(),
                logs=tempfile.mkdtemp(prefix=stem, dir=log_root()),
                sockets=tempfile.mkdtemp(prefix="epd-serve-"),
                file=None if file is None else str(file.resolve()),
            )
            lock = os.open(run.logs, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)  # before another launcher finds the run and takes it for ended
            Path(run.logs, _RUN_FILE).write_bytes(msgspec.json.encode(run))
        except OSError as error:
            raise ValueError(
                f"cannot make directories for logs and sockets ({error}); set EPD_SERVE_LOG_DIR and TMPDIR to "
                "writable directories with short paths"
            ) from error
        return run, lock

    def end(self, lock: int, *, keep_logs: bool) -> None:
        shutil.rmtree(self.sockets, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(self.logs, ignore_errors=True)
        os.close(lock)

    @property
    def lasts(self) -> bool:
        """Return whether its launcher runs."""
        try:
            lock = os.open(self.logs, os.O_RDONLY)
        except FileNotFoundError:  # removed since it was listed
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    @property
    def control(self) -> Path:
        """The launcher's socket (launch/apply.py)."""
        return Path(self.sockets, "control")

    @property
    def admin(self) -> Path:
        """The socket of the gateway's admin API; a link to the current gateway's."""
        return Path(self.sockets, "admin")

    def is_called(self, wanted: str) -> bool:
        """Return whether ``wanted`` is its gateway's address or port, or its deployment file."""
        names = (self.address, self.address.rpartition(":")[2])
        return wanted in names or (self.file is not None and str(Path(wanted).resolve()) == self.file)

    def __str__(self) -> str:
        return self.address if self.file is None else f"{self.address} ({Path(self.file).name})"


def log_root() -> Path:
    """Return ``EPD_SERVE_LOG_DIR``, or a directory below the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.environ.get("EPD_SERVE_LOG_DIR") or f"{state}/epd-serve/logs").expanduser()


def all_runs() -> list[Run]:
    """Return the kept runs, the latest first."""
    found: list[tuple[int, Run]] = []
    for file in log_root().glob(f"*/{_RUN_FILE}"):
        with suppress(OSError, msgspec.MsgspecError):  # just removed, or of another version
            found.append((file.stat().st_mtime_ns, msgspec.json.decode(file.read_bytes(), type=Run)))
    return [run for _, run in sorted(found, key=lambda one: one[0], reverse=True)]


def running() -> list[Run]:
    """Return the running deployments."""
    return [run for run in all_runs() if run.lasts]


def find_run(wanted: str | None, preferred_port: int | None = None) -> Run:
    """Return a running deployment.

    ``wanted``: its ``HOST:PORT``, port or deployment file; None: the only one, or the one with ``preferred_port``.
    Raises ValueError unless exactly one fits.
    """
    found = chosen = running()
    if not found:
        raise ValueError("no deployment of this user is running; start one with 'epd-serve up'")
    names = ", ".join(map(str, found))
    if wanted is not None or len(found) > 1:
        chosen = [run for run in found if run.is_called(wanted or str(preferred_port))]
    if not chosen and wanted is not None:
        raise ValueError(f"no running deployment of this user is called {wanted}; running: {names}")
    if len(chosen) != 1:
        raise ValueError(f"several deployments are running; name one with --deployment: {names}")
    return chosen[0]
