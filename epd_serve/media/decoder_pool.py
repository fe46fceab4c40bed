"""Decode media files and try grammars in disposable processes."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec

from epd_serve.errors import InvalidRequest, StageTimeout, Unavailable
from epd_serve.media.audio import AudioLimits
from epd_serve.media.decoder import (
    CHANNELS,
    GO_ON,
    MESSAGE_BYTES,
    SAMPLE_BYTES,
    AnyJob,
    Assignment,
    AudioFactsJob,
    AudioJob,
    Compiled,
    Done,
    Ended,
    Frames,
    GrammarJob,
    PictureJob,
    Refused,
    SizeJob,
    Told,
    VideoFactsJob,
    VideoJob,
)
from epd_serve.media.picture import MediaLimits, plain_size
from epd_serve.media.video import VideoLimits
from epd_serve.types import AudioFacts, VideoFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: CPU seconds of a task in a quick place, fixed and per result byte, after which it restarts in a slow place.
_QUICK_CPU_S, _QUICK_S_PER_BYTE = 0.02, 5e-9
#: Longer audio is decoded in a slow place.
_QUICK_SOUND_S = 10.0
#: Niceness of workers in slow places, which yield to other computation on this machine.
_NICENESS = 10
#: A worker has stalled after this many seconds plus this multiple of its CPU time.
_LEAST_STALL_S, _MAX_STRETCH = 10.0, 15
#: Pixels to decode concurrently, in units; Pillow takes up to 27 bytes per pixel (WebP). A larger image is decoded
#: alone. Small images are not counted, because the places bound their number.
_UNIT_PIXELS, _NUM_UNITS, _SMALL_PIXELS = 1 << 22, 8, 1 << 21
#: Bytes of video frames to hand over together.
_FRAMES_BYTES = 32 * 1024**2
#: Copy larger files on a thread; do not reuse workers with more memory.
_LARGE_BYTES, _KEPT_BYTES = 1024**2, 16 * 1024**2
#: Guards memory; the gateway applies the operator's limits.
_MAX_SAMPLES = 1 << 27
#: Environment variables that workers inherit: only those that Python and its libraries need, so no secrets.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
#: Signals of a decoder that crashes.
_CRASHES = tuple(-getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "ABRT", "FPE", "ILL"))
#: Advice for files that take too long.
_REMEDIES = {
    "image": "save it again with another program, or scale it down",
    "video": "send a shorter or smaller one",
    "audio": "send a shorter one, or save it as WAV or FLAC",
    "structure": "simplify it",
}
_told: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)
T = TypeVar("T")


class Place(Protocol):
    """A place of :class:`~epd_serve.instance.text.request_processor.RequestProcessor`."""

    @property
    def is_slow(self) -> bool: ...

    async def become_slow(self) -> None:
        """Exchange a quick place for a slow one, waiting if necessary."""
        ...


class DecoderPool:
    """Runs each file, and each set of grammars, in a worker process. Use it from one event loop.

    Workers that decoded a quick image are reused; all others end with their file. The process that forks workers
    starts with the first file, or with :meth:`start`. The event loop's thread must outlive the pool. The callers'
    places limit the number of workers.

    All methods raise InvalidRequest if the file is corrupt or needs too much time or memory, on any instance;
    Unavailable if the worker was killed from outside; StageTimeout if the worker stalled.

    Args:
        cpu_s: limit on CPU seconds for decoding an image or reading the facts of a video.
        limits: limits on images.
        num_kept: number of idle workers to keep for images.
    """

    def __init__(self, *, cpu_s: float, limits: MediaLimits, num_kept: int = 1) -> None:
        self._cpu_s = cpu_s
        self._limits = limits
        self._num_kept = num_kept
        self._idle: list[_Worker] = []
        self._units = asyncio.Semaphore(_NUM_UNITS)
        self._next_picture = asyncio.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process that forks workers. Raises OSError."""
        if self._server is not None and self._server.poll() is not None:
            logger.warning(
                "the process that forks decoders ended (exit code %s); restarting it", self._server.poll()
            )
            self.close()
        if self._server is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                program = [sys.executable, "-P", "-m", "epd_serve.media.decoder"]
                self._server = subprocess.Popen(
                    [*program, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                )

    def close(self) -> None:
        """End all processes. Blocks for a moment."""
        while self._idle:
            self._idle.pop().close()
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.kill()  # its workers die with it
            self._server.wait()
        self._server = self._control = None

    @asynccontextmanager
    async def decoded(
        self, data: bytes, size: tuple[int, int], place: Place, *, low_detail: bool = False
    ) -> AsyncGenerator[NDArray[np.uint8]]:
        """Decode an image to [height, width, 3] uint8, in memory reused after the context ends.

        Args:
            size: width and height from the header, or after ``low_detail`` scaling.
        """
        num_pixels = num_shown = size[0] * size[1]
        self._check_pixels("image has", size)
        if low_detail:
            found = plain_size(data)
            num_pixels = _UNIT_PIXELS * _NUM_UNITS if found is None else found[0] * found[1]
        is_small = num_pixels <= _SMALL_PIXELS
        if not is_small and not place.is_slow:
            await place.become_slow()  # first, so that no task holds units while it waits for a place
        job = PictureJob(size=size, low_detail=low_detail, limits=self._limits)
        task = _Task("image", data, job, self._cpu_s, num_bytes=CHANNELS * num_shown)
        async with AsyncExitStack() as room:
            if not is_small:
                async with self._next_picture:  # one at a time, so that a large image is not starved
                    for _ in range(min(-(-num_pixels // _UNIT_PIXELS), _NUM_UNITS)):
                        await room.enter_async_context(self._units)
            with await self._run(task, place) as worker:
                yield worker.pixels(size)[0]
                if worker.is_light and len(self._idle) < self._num_kept:
                    worker.is_kept = True
                    self._idle.append(worker)

    async def size(self, data: bytes, *, cpu_s: float) -> tuple[int, int]:
        """Read the size of an image (:func:`epd_serve.media.picture.pixel_size`) within ``cpu_s`` CPU seconds."""
        return await self._result(_Task("image", data, SizeJob(self._limits), cpu_s), tuple[int, int])

    async def facts(self, data: bytes, limits: VideoLimits, list_fps: float | None = None) -> VideoFacts:
        """Read the facts of a video file or a frame list (:mod:`epd_serve.media.video`)."""
        return await self._result(_Task("video", data, VideoFactsJob(limits, list_fps), self._cpu_s), VideoFacts)

    async def audio_facts(self, data: bytes, limits: AudioLimits, *, cpu_s: float) -> AudioFacts:
        """Decode an audio file for its facts within ``cpu_s`` CPU seconds (:mod:`epd_serve.media.audio`)."""
        return await self._result(_Task("audio", data, AudioFactsJob(limits), cpu_s), AudioFacts)

    async def samples(
        self, data: bytes, facts: AudioFacts, rate: int, place: Place, *, cpu_s: float
    ) -> NDArray[np.float32]:
        """Decode audio at ``rate`` samples per second to the mean of its channels, [samples].

        ``cpu_s`` limits its CPU seconds.
        """
        count = facts.count_at(rate)
        if count > _MAX_SAMPLES:
            raise InvalidRequest(f"the audio lasts {facts.duration_s:.0f} s, far more than any model accepts")
        if facts.duration_s > _QUICK_SOUND_S and not place.is_slow:
            await place.become_slow()
        task = _Task("audio", data, AudioJob(facts, rate), cpu_s, num_bytes=SAMPLE_BYTES * count)
        with await self._run(task, place) as worker:
            import numpy as np  # not installed at the gateway, which reads no samples

            return np.frombuffer(worker.area, np.float32, count)

    async def frames(
        self, data: bytes, facts: VideoFacts, indices: Sequence[int], place: Place, *, cpu_s: float
    ) -> AsyncGenerator[NDArray[np.uint8]]:
        """Yield the frames ``indices`` in batches [n, height, width, 3], in memory that the next batch reuses.

        ``cpu_s`` limits the CPU seconds of the whole video. The caller must close the generator.
        """
        size = facts.width, facts.height
        self._check_pixels("video's frames have", size)
        if not place.is_slow:
            await place.become_slow()
        num_bytes = CHANNELS * size[0] * size[1]
        num_at_once = max(1, min(len(indices), _FRAMES_BYTES // num_bytes))
        job = VideoJob(facts=facts, indices=list(indices), num_at_once=num_at_once)
        task = _Task("video", data, job, cpu_s, num_bytes=num_bytes * num_at_once)
        with await self._begin(task, cpu_s, _NICENESS) as worker:
            while isinstance(told := await worker.answer(), Frames):
                yield worker.pixels(size, told.count)
                worker.tell(GO_ON)

    async def compile(self, grammars: Sequence[str], place: Place, *, cpu_s: float) -> Compiled:
        """Compile grammars within ``cpu_s`` CPU seconds and return their problems."""
        task = _Task("structure", msgspec.json.encode(grammars), GrammarJob(), cpu_s)
        return await self._result(task, Compiled, place)

    # ------------------------------------------------------------------ inside

    def _check_pixels(self, what: str, size: tuple[int, int]) -> None:
        if size[0] * size[1] > self._limits.max_pixels:
            raise InvalidRequest(
                f"the {what} {size[0]}x{size[1]} pixels; at most {self._limits.max_pixels} are accepted"
            )

    async def _result(self, task: _Task, kind: type[T], place: Place | None = None) -> T:
        """Run a task and return its result."""
        with await self._run(task, place) as worker:
            return msgspec.convert(worker.result, kind)

    async def _run(self, task: _Task, place: Place | None = None) -> _Worker:
        """Run a task and return its worker, whose shared memory holds the result.

        In a quick place the task first gets little CPU time; if that runs out, it restarts in a slow place.
        """
        if place is not None and not place.is_slow:
            quick_s = min(_QUICK_CPU_S + _QUICK_S_PER_BYTE * task.num_bytes, task.cpu_s)
            try:
                # niceness even for a grammar's first try: many invalid grammars could occupy the cores
                return await self._try(task, quick_s, _NICENESS if isinstance(task.job, GrammarJob) else 0)
            except _OutOfTime:
                if quick_s == task.cpu_s:
                    raise
            await place.become_slow()
        return await self._try(task, task.cpu_s, 0 if place is None else _NICENESS)

    async def _try(self, task: _Task, cpu_s: float, niceness: int) -> _Worker:
        worker = await self._begin(task, cpu_s, niceness)
        try:
            await worker.answer()
        except BaseException:
            worker.close()
            raise
        return worker

    async def _begin(self, task: _Task, cpu_s: float, niceness: int) -> _Worker:
        """Start a task and return its worker. Raises Unavailable."""
        if not task.data:
            raise InvalidRequest(f"the {task.what} is empty (0 bytes)")
        self.start()
        while self._idle and not niceness and isinstance(task.job, PictureJob):
            if (worker := self._idle.pop()).is_alive():
                break
            worker.close()
        else:
            assert self._control is not None
            worker = _Worker(self._control, task.job.libraries)
        try:
            await worker.begin(task, cpu_s, niceness)
        except BaseException:
            worker.close()
            raise
        return worker


@dataclass(frozen=True, slots=True)
class _Task:
    """Work for a worker process.

    Attributes:
        what: kind of file, for error messages.
        data: the file.
        cpu_s: limit on CPU seconds.
        num_bytes: size of the result in shared memory.
    """

    what: str
    data: bytes
    job: AnyJob
    cpu_s: float
    num_bytes: int = 0


class _OutOfTime(InvalidRequest):
    """The task's CPU time ran out."""


class _Worker:
    """A worker process with its socket and shared memory. Leaving its context kills it, unless it is kept.

    Raises Unavailable if the process that forks workers is gone.

    Attributes:
        area: the shared memory.
        result: that of the task; None if it is in the shared memory.
        is_kept: it outlives its context.
    """

    area: mmap.mmap
    _task: _Task

    def __init__(self, control: socket.socket, libraries: bytes) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        self._descriptor = os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # a compromised worker must not shrink the memory while this process reads it
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._num_bytes = 0
        self._cpu_s = self._deadline_s = 0.0
        self._is_nice = False
        self.result: Any = None
        self.is_kept = False
        with theirs:
            try:
                socket.send_fds(control, [libraries], [theirs.fileno(), self._descriptor])
            except OSError as error:
                self.close()
                raise Unavailable("cannot start a process to decode media", code="decoder_lost") from error

    def __enter__(self) -> Self:
        self.is_kept = False
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_kept:
            self.close()

    @property
    def is_light(self) -> bool:
        """True if it may be reused: it has normal priority and little memory."""
        return not self._is_nice and self._num_bytes <= _KEPT_BYTES

    def close(self) -> None:
        """Kill the worker; its memory lives as long as it is referenced. Idempotent."""
        if self._descriptor >= 0:
            self._connection.close()
            os.close(self._descriptor)
            self._descriptor = -1

    async def begin(self, task: _Task, cpu_s: float, niceness: int) -> None:
        """Hand a task over, in shared memory, which grows if necessary."""
        self._task, self._cpu_s, self._is_nice = task, cpu_s, bool(niceness)
        self._deadline_s = asyncio.get_running_loop().time() + _LEAST_STALL_S + _MAX_STRETCH * task.cpu_s
        num_bytes = max(len(task.data), task.num_bytes)
        if self._num_bytes < num_bytes:
            self._num_bytes = num_bytes + -num_bytes % mmap.PAGESIZE
            os.ftruncate(self._descriptor, self._num_bytes)
            self.area = mmap.mmap(self._descriptor, self._num_bytes)
        if len(task.data) > _LARGE_BYTES:
            await asyncio.to_thread(self._write, task.data)
        else:
            self._write(task.data)
        assignment = Assignment(
            num_bytes=len(task.data),
            area_bytes=self._num_bytes,
            cpu_s=cpu_s,
            niceness=niceness,
            job=task.job,
        )
        self.tell(msgspec.msgpack.encode(assignment))

    def _write(self, data: bytes) -> None:
        self.area[: len(data)] = data

    def tell(self, message: bytes) -> None:
        with suppress(OSError):  # the worker has ended; its answer will say how
            self._connection.send(message)

    def is_alive(self) -> bool:
        """Return whether the worker runs and has sent nothing since its last answer."""
        try:
            self._connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def answer(self) -> Done | Frames:
        """Return the worker's next message. Raises as the pool's methods do."""
        what, who = self._task.what, "compiler" if self._task.what == "structure" else "decoder"
        told: Told
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await asyncio.get_running_loop().sock_recv(self._connection, MESSAGE_BYTES)
            told = _told.decode(message) if message else Ended(1)
        except TimeoutError:
            stall_s = _LEAST_STALL_S + _MAX_STRETCH * self._task.cpu_s
            if what == "structure":  # it had enough time: another instance would fail too
                raise InvalidRequest(
                    f"the structure did not compile within {stall_s:g} s: {_REMEDIES[what]}",
                    code="structure_too_complex",
                ) from None
            raise StageTimeout(f"the {who} did not finish within {stall_s:g} s", code=f"{who}_stalled") from None
        except OSError:
            told = Ended(1)
        except ValueError:  # sent by a compromised worker
            told = Ended(-signal.SIGABRT)
        if isinstance(told, Refused):
            is_complex = told.code == "too_complex"
            raise InvalidRequest(told.message, code=f"{what}_too_complex" if is_complex else told.code)
        if isinstance(told, Done | Frames):
            self.result = told.result if isinstance(told, Done) else None
            return told
        if told.code == -signal.SIGPROF:
            raise _OutOfTime(
                f"the {what} took more than {self._cpu_s:g} s of CPU time: {_REMEDIES[what]}",
                code=f"{what}_too_complex",
            )
        how = signal.Signals(-told.code).name if told.code < 0 else f"exit code {told.code}"
        if told.code in _CRASHES:
            raise InvalidRequest(
                f"the {what} crashes the {who} ({how}): send another one", code=f"{what}_crashes_{who}"
            )
        raise Unavailable(f"the worker for the {what} was killed ({how}); try again", code=f"{who}_lost")

    def pixels(self, size: tuple[int, int], count: int = 1) -> NDArray[np.uint8]:
        """Return decoded images of one (width, height), [count, height, width, 3]."""
        import numpy as np  # not installed at the gateway, which reads no pixels

        shape = count, size[1], size[0], CHANNELS
        if not 0 < math.prod(shape) <= self._num_bytes:  # a compromised worker
            raise InvalidRequest("the media file crashes the decoder: send another one")
        return np.frombuffer(self.area, np.uint8, math.prod(shape)).reshape(shape)
