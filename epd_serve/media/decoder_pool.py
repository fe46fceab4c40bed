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
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

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
        num_pixels = size[0] * size[1]
        if num_pixels > self._limits.max_pixels:
            raise InvalidRequest(
                f"the image has {size[0]}x{size[1]} pixels; at most {self._limits.max_pixels} are accepted"
            )
        if low_detail:
            found = plain_size(data)
            num_pixels = _UNIT_PIXELS * _NUM_UNITS if found is None else found[0] * found[1]
        is_small = num_pixels <= _SMALL_PIXELS
        if not is_small and not place.is_slow:
            await place.become_slow()  # first, so that no task holds units while it waits for a place
        job = PictureJob(size=size, low_detail=low_detail, limits=self._limits)
        task = _Task("image", data, CHANNELS * size[0] * size[1], job, self._cpu_s)
        async with AsyncExitStack() as room:
            if not is_small:
                async with self._next_picture:  # one at a time, so that a large image is not starved
                    for _ in range(min(-(-num_pixels // _UNIT_PIXELS), _NUM_UNITS)):
                        await room.enter_async_context(self._units)
            with await self._run(task, place) as worker:
                yield worker.pixels(size)[0]
                is_light = not worker.is_nice and len(worker.area) <= _KEPT_BYTES
                if is_light and len(self._idle) < self._num_kept:
                    worker.is_kept = True
                    self._idle.append(worker)

    async def size(self, data: bytes, *, cpu_s: float) -> tuple[int, int]:
        """Read the size of an image (:func:`epd_serve.media.picture.pixel_size`) within ``cpu_s`` CPU seconds."""
        return await self._result(_Task("image", data, 0, SizeJob(self._limits), cpu_s), tuple[int, int])

    async def facts(self, data: bytes, limits: VideoLimits, list_fps: float | None = None) -> VideoFacts:
        """Read the facts of a video file or a frame list (:mod:`epd_serve.media.video`)."""
        return await self._result(
            _Task("video", data, 0, VideoFactsJob(limits, list_fps), self._cpu_s), VideoFacts
        )

    async def audio_facts(self, data: bytes, limits: AudioLimits, *, cpu_s: float) -> AudioFacts:
        """Decode an audio file for its facts within ``cpu_s`` CPU seconds (:mod:`epd_serve.media.audio`)."""
        return await self._result(_Task("audio", data, 0, AudioFactsJob(limits), cpu_s), AudioFacts)

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
        task = _Task("audio", data, SAMPLE_BYTES * count, AudioJob(facts, rate), cpu_s)
        with await self._run(task, place) as worker:
            return worker.samples(count)

    async def frames(
        self, data: bytes, facts: VideoFacts, indices: Sequence[int], place: Place, *, cpu_s: float
    ) -> AsyncGenerator[NDArray[np.uint8]]:
        """Yield the frames ``indices`` in batches [n, height, width, 3], in memory that the next batch reuses.

        ``cpu_s`` limits the CPU seconds of the whole video. The caller must close the generator.
        """
        if facts.width * facts.height > self._limits.max_pixels:
            raise InvalidRequest(
                f"the video's frames have {facts.width}x{facts.height} pixels; at most {self._limits.max_pixels} "
                "are accepted"
            )
        if not place.is_slow:
            await place.become_slow()
        num_bytes = CHANNELS * facts.width * facts.height
        num_at_once = max(1, min(len(indices), _FRAMES_BYTES // num_bytes))
        job = VideoJob(facts=facts, indices=list(indices), num_at_once=num_at_once)
        task = _Task("video", data, num_bytes * num_at_once, job, cpu_s)
        with await self._begin(task, cpu_s, _NICENESS) as worker:
            deadline_s = asyncio.get_running_loop().time() + task.stall_s
            while isinstance(told := _checked(await worker.answer(deadline_s), task, cpu_s), Frames):
                yield worker.pixels((facts.width, facts.height), told.count)
                worker.tell(GO_ON)

    async def compile(self, grammars: Sequence[str], place: Place, *, cpu_s: float) -> Compiled:
        """Compile grammars within ``cpu_s`` CPU seconds and return their problems."""
        task = _Task("structure", msgspec.json.encode(grammars), 0, GrammarJob(), cpu_s)
        return await self._result(task, Compiled, place)

    # ------------------------------------------------------------------ inside

    async def _result(self, task: _Task, kind: type[T], place: Place | None = None) -> T:
        """Run a task and return its result."""
        with await self._run(task, place) as worker:
            assert isinstance(worker.told, Done)
            return msgspec.convert(worker.told.result, kind)

    async def _run(self, task: _Task, place: Place | None = None) -> _Worker:
        """Run a task and return its worker, whose shared memory holds the result.

        In a quick place the task first gets little CPU time; if that runs out, it restarts in a slow place.
        """
        if place is not None and not place.is_slow:
            quick_s = min(_QUICK_CPU_S + _QUICK_S_PER_BYTE * task.num_bytes, task.cpu_s)
            # niceness even for a grammar's first try: many invalid grammars could occupy the cores
            worker = await self._try(task, quick_s, _NICENESS if isinstance(task.job, GrammarJob) else 0)
            if worker.told != Ended(-signal.SIGPROF) or quick_s == task.cpu_s:
                _checked(worker.told, task, quick_s)
                return worker
            await place.become_slow()
        worker = await self._try(task, task.cpu_s, 0 if place is None else _NICENESS)
        _checked(worker.told, task, task.cpu_s)
        return worker

    async def _try(self, task: _Task, cpu_s: float, niceness: int) -> _Worker:
        """Run a task once and return its worker, closed if it gave no result."""
        worker = await self._begin(task, cpu_s, niceness)
        try:
            told = await worker.answer(asyncio.get_running_loop().time() + task.stall_s)
        except BaseException:
            worker.close()
            raise
        if told is None or isinstance(told, Ended | Refused):
            worker.close()
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
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            worker = _Worker(ours)
            with theirs:
                try:
                    given = [theirs.fileno(), worker.descriptor]
                    socket.send_fds(self._control, [task.job.libraries], given)
                except OSError as error:
                    worker.close()
                    raise Unavailable("cannot start a process to decode media", code="decoder_lost") from error
        try:
            num_bytes = max(len(task.data), task.num_bytes)
            if len(task.data) > _LARGE_BYTES:
                await asyncio.to_thread(worker.write, task.data, num_bytes)
            else:
                worker.write(task.data, num_bytes)
            worker.is_nice = bool(niceness)
            assignment = Assignment(
                num_bytes=len(task.data),
                area_bytes=len(worker.area),
                cpu_s=cpu_s,
                niceness=niceness,
                job=task.job,
            )
            worker.tell(msgspec.msgpack.encode(assignment))
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
        num_bytes: size of the result.
        cpu_s: limit on CPU seconds.
    """

    what: str
    data: bytes
    num_bytes: int
    job: AnyJob
    cpu_s: float

    @property
    def stall_s(self) -> float:
        """Seconds after which its worker counts as stalled."""
        return _LEAST_STALL_S + _MAX_STRETCH * self.cpu_s


def _checked(told: Told | None, task: _Task, cpu_s: float) -> Told:
    """Return the worker's answer, or raise the error of a failed task."""
    what, who = task.what, "compiler" if task.what == "structure" else "decoder"
    if told is None and what == "structure":  # it had enough time: another instance would fail too
        raise InvalidRequest(
            f"the structure did not compile within {task.stall_s:g} s: {_REMEDIES[what]}",
            code="structure_too_complex",
        )
    if told is None:
        raise StageTimeout(f"the {who} did not finish within {task.stall_s:g} s", code=f"{who}_stalled")
    if isinstance(told, Refused):
        raise InvalidRequest(told.message, code=f"{what}_too_complex" if told.code == "too_complex" else told.code)
    if not isinstance(told, Ended):
        return told
    if told.code == -signal.SIGPROF:
        raise InvalidRequest(
            f"the {what} took more than {cpu_s:g} s of CPU time: {_REMEDIES[what]}",
            code=f"{what}_too_complex",
        )
    if told.code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL):
        raise InvalidRequest(
            f"the {what} crashes the {who} ({signal.Signals(-told.code).name}): send another one",
            code=f"{what}_crashes_{who}",
        )
    how = signal.Signals(-told.code).name if told.code < 0 else f"exit code {told.code}"
    raise Unavailable(f"the worker for the {what} was killed ({how}); try again", code=f"{who}_lost")


#: Advice for files that take too long.
_REMEDIES = {
    "image": "save it again with another program, or scale it down",
    "video": "send a shorter or smaller one",
    "audio": "send a shorter one, or save it as WAV or FLAC",
    "structure": "simplify it",
}


class _Worker:
    """A worker process with its socket and shared memory. Leaving its context kills it, unless it is kept.

    Attributes:
        descriptor: file descriptor of the shared memory.
        told: its last answer; None after a timeout.
        is_nice: it yields to other processes.
        is_kept: it outlives its context.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.descriptor = os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # a compromised worker must not shrink the memory while this process reads it
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._area: mmap.mmap | None = None
        self.told: Told | None = None
        self.is_kept = self.is_nice = False

    def __enter__(self) -> Self:
        self.is_kept = False
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_kept:
            self.close()

    @property
    def area(self) -> mmap.mmap:
        assert self._area is not None, "write() comes first"
        return self._area

    def close(self) -> None:
        """Kill the worker; its memory lives as long as it is referenced. Idempotent."""
        if self.descriptor >= 0:
            self._connection.close()
            os.close(self.descriptor)
            self.descriptor = -1

    def write(self, data: bytes, num_bytes: int) -> None:
        """Copy a file into the shared memory, grown to at least ``num_bytes``."""
        if self._area is None or len(self._area) < num_bytes:
            num_bytes += -num_bytes % mmap.PAGESIZE
            os.ftruncate(self.descriptor, num_bytes)
            self._area = mmap.mmap(self.descriptor, num_bytes)
        self._area[: len(data)] = data

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

    async def answer(self, deadline_s: float) -> Told | None:
        """Return the worker's next message, or None at the deadline (event loop clock)."""
        try:
            async with asyncio.timeout_at(deadline_s):
                message = await asyncio.get_running_loop().sock_recv(self._connection, MESSAGE_BYTES)
            self.told = _told.decode(message) if message else Ended(1)
        except TimeoutError:
            self.told = None
        except OSError:
            self.told = Ended(1)
        except ValueError:  # sent by a compromised worker
            self.told = Ended(-signal.SIGABRT)
        return self.told

    def pixels(self, size: tuple[int, int], count: int = 1) -> NDArray[np.uint8]:
        """Return decoded images of one (width, height), [count, height, width, 3]."""
        import numpy as np  # not installed at the gateway, which reads no pixels

        shape = count, size[1], size[0], CHANNELS
        self._check_room(math.prod(shape))
        return np.frombuffer(self.area, np.uint8, math.prod(shape)).reshape(shape)

    def samples(self, count: int) -> NDArray[np.float32]:
        """Return decoded samples, [count]."""
        import numpy as np  # not installed at the gateway, which reads no samples

        self._check_room(SAMPLE_BYTES * count)
        return np.frombuffer(self.area, np.float32, count)

    def _check_room(self, num_bytes: int) -> None:
        if not 0 < num_bytes <= len(self.area):  # a compromised worker
            raise InvalidRequest("the media file crashes the decoder: send another one")
