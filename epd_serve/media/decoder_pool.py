"""The decoding of media files, and the first compiling of grammars, in processes that may be ended, as an instance
sees it."""

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
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from epd_serve.errors import InvalidRequest, StageTimeout, Unavailable
from epd_serve.media.audio import AudioLimits
from epd_serve.media.decoder import (
    CHANNELS,
    GO_ON,
    MESSAGE_BYTES,
    PLAIN,
    SAMPLE_BYTES,
    TIMED,
    AnyJob,
    Assignment,
    AudioFactsJob,
    AudioJob,
    Compiled,
    Decoded,
    Ended,
    Facts,
    FactsJob,
    Frames,
    GrammarJob,
    HeardFacts,
    PictureJob,
    Refused,
    Started,
    Told,
    VideoJob,
)
from epd_serve.media.picture import MediaLimits, plain_size
from epd_serve.media.video import VideoLimits
from epd_serve.types import AudioFacts, VideoFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: A file that takes longer leaves its place to others.
_QUICK_S = 0.1
#: A file that takes longer than its pixels explain goes on with what processor time nobody else wants.
_FAIR_S, _S_PER_PIXEL = 0.5, 1e-7
_NICENESS = 10
#: A worker that has had its CPU time for so many times as long stands still.
_MAX_STRETCH = 15
#: Memory that a worker keeps between two files.
_KEPT_BYTES = 16 * 1024**2
#: Pixels of the pictures that are decoded at once; Pillow takes up to 27 bytes for each (WebP). A larger picture
#: is decoded alone; small ones are not counted, as their number is bounded by the places.
_MAX_PIXELS, _SMALL_PIXELS = 1 << 25, 1 << 21
#: Frames of a video that are handed over together.
_FRAMES_BYTES = 32 * 1024**2
#: The variables that workers inherit: those that Python and its libraries need, and no secret.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
#: Of that, 16 MiB for Pillow: fresh pages for each picture take as long as a small picture's decoding.
_PILLOW = {"PILLOW_BLOCKS_MAX": "1"}
#: The gateway applies the operator's limits; this one guards the memory.
_MAX_SAMPLES = 1 << 27
_EXIT_GRACE_S = 1.0
_told: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


class Place(Protocol):
    """A place of :class:`~epd_serve.instance.text.request_processor.RequestProcessor`."""

    @property
    def is_aside(self) -> bool: ...

    def step_aside(self) -> bool: ...

    async def wait_aside(self) -> None: ...


class DecoderPool:
    """Workers, each a process that decodes a file or compiles a grammar at a time. It belongs to one event loop.

    The processes are started with the first file, or by :meth:`start`. The thread of the event loop must live as
    long as they shall. How many are at work is up to the places of those who ask.

    Args:
        num_kept: idle workers that are kept.
        cpu_s: seconds of CPU time that one file may take.
        limits: of a picture.
    """

    def __init__(self, num_kept: int, *, cpu_s: float, limits: MediaLimits) -> None:
        self._num_kept = num_kept
        self._cpu_s = cpu_s
        self._limits = limits
        self._room = _Room(_MAX_PIXELS)
        self._idle: list[_Worker] = []
        self._working: set[_Worker] = set()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def is_started(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        """Start the process that forks workers, and one of these. Raises OSError."""
        if not self.is_started:
            self._start_server()
            self._idle.append(self._new_worker())

    @asynccontextmanager
    async def decoded(
        self, data: bytes, size: tuple[int, int], place: Place, *, low_detail: bool = False
    ) -> AsyncGenerator[NDArray[np.uint8]]:
        """The pixels of a picture, [height, width, 3], in memory that the next picture gets after the block.

        Args:
            size: width and height as the header says, or those to which it is scaled down (``low_detail``).
            place: is left to others, for one beside them, where the picture takes long.

        Raises:
            InvalidRequest: the file is broken, or took more time or memory than a file may. It would elsewhere.
            Unavailable: the worker was ended by somebody else.
            StageTimeout: the worker stood still.
        """
        if size[0] * size[1] > self._limits.max_pixels:
            raise InvalidRequest(
                f"the image has {size[0]}x{size[1]} pixels; at most {self._limits.max_pixels} are taken"
            )
        job = PictureJob(width=size[0], height=size[1], low_detail=low_detail, limits=self._limits)
        num_pixels = size[0] * size[1]
        found = (plain_size(data) or (_MAX_PIXELS, 1)) if low_detail else size
        num_decoded = found[0] * found[1]
        if num_decoded > _SMALL_PIXELS and not place.step_aside():
            await place.wait_aside()  # who has room waits for no place
        fair_s = _FAIR_S + _S_PER_PIXEL * num_pixels
        task = _Task("image", data, CHANNELS * num_pixels, job, self._cpu_s, fair_s)
        async with self._room.taken(num_decoded if num_decoded > _SMALL_PIXELS else 0):
            worker, _ = await self._run(task, place)
            try:
                yield worker.pixels(size)[0]
            finally:
                self._put_back(worker)

    async def facts(self, data: bytes, limits: VideoLimits, place: Place) -> VideoFacts:
        """The facts of a video's file (:func:`epd_serve.media.video.read_facts`). Raises as :meth:`decoded`."""
        _check_not_empty(data, "video")
        worker, told = await self._run(_Task("video", data, 0, FactsJob(limits), self._cpu_s), place)
        self._put_back(worker)
        assert isinstance(told, Facts), told
        return told.facts

    async def audio_facts(self, data: bytes, limits: AudioLimits, place: Place, *, cpu_s: float) -> AudioFacts:
        """The facts of a sound's file (:func:`epd_serve.media.audio.read_audio_facts`), all of which is decoded.

        Raises as :meth:`decoded`. ``cpu_s``: seconds of CPU time that it may take.
        """
        _check_not_empty(data, "audio")
        worker, told = await self._run(_Task("audio", data, 0, AudioFactsJob(limits), cpu_s), place)
        self._put_back(worker)
        assert isinstance(told, HeardFacts), told
        return told.facts

    @asynccontextmanager
    async def samples(
        self, data: bytes, facts: AudioFacts, rate: int, place: Place, *, cpu_s: float
    ) -> AsyncGenerator[NDArray[np.float32]]:
        """A sound's samples at ``rate``, the mean of its channels, in memory that the next file gets.

        Raises as :meth:`decoded`. ``cpu_s``: seconds of CPU time that it may take.
        """
        _check_not_empty(data, "audio")
        count = facts.count_at(rate)
        if count > _MAX_SAMPLES:
            raise InvalidRequest(f"the audio has {facts.duration_s:.0f} s, far more than any model takes")
        task = _Task("audio", data, SAMPLE_BYTES * count, AudioJob(facts, rate), cpu_s)
        worker, _ = await self._run(task, place)
        try:
            yield worker.samples(count)
        finally:
            self._put_back(worker)

    async def frames(
        self, data: bytes, facts: VideoFacts, indices: Sequence[int], place: Place, *, cpu_s: float
    ) -> AsyncGenerator[NDArray[np.uint8]]:
        """The frames with these numbers, in order, some at a time: [n, height, width, 3], in memory that the next
        ones get. Close the generator. Raises as :meth:`decoded`.

        Args:
            cpu_s: seconds of CPU time that the video may take.
        """
        _check_not_empty(data, "video")
        if facts.width * facts.height > self._limits.max_pixels:
            raise InvalidRequest(
                f"the video's frames have {facts.width}x{facts.height} pixels; at most {self._limits.max_pixels} "
                "are taken"
            )
        if not place.step_aside():
            await place.wait_aside()  # videos take long
        num_bytes = CHANNELS * facts.width * facts.height
        num_at_once = max(1, min(len(indices), _FRAMES_BYTES // num_bytes))
        job = VideoJob(facts=facts, indices=list(indices), num_at_once=num_at_once)
        task = _Task("video", data, num_bytes * num_at_once, job, cpu_s)
        worker, is_over = self._take(TIMED), False
        try:
            await worker.give(task)
            deadline = asyncio.get_running_loop().time() + _MAX_STRETCH * cpu_s
            while not is_over:
                told = await worker.answer(_FAIR_S)
                if told is None:
                    worker.give_way()
                    told = await worker.answer(deadline - asyncio.get_running_loop().time())
                told = _checked(told, task)
                is_over = isinstance(told, Decoded)
                if isinstance(told, Frames):
                    yield worker.pixels((facts.width, facts.height), told.count)
                    worker.tell(GO_ON)
        except InvalidRequest:
            is_over = not worker.has_ended
            raise
        finally:
            if is_over:
                self._put_back(worker)
            else:
                self._drop(worker)

    async def compile(self, grammars: Sequence[str], *, cpu_s: float) -> Compiled:
        """Compile grammars in ``cpu_s`` seconds of CPU time; return their problems. Raises as :meth:`decoded`."""
        task = _Task("structure", msgspec.json.encode(grammars), 0, GrammarJob(), cpu_s)
        worker, told = await self._run(task, None)
        self._put_back(worker)
        assert isinstance(told, Compiled), told
        return told

    def close(self) -> None:
        """End all processes. Blocks for a moment."""
        for worker in (*self._idle, *self._working):
            worker.close()
        self._idle.clear()
        self._working.clear()
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            try:
                self._server.wait(_EXIT_GRACE_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server = self._control = None

    # ------------------------------------------------------------------ inside

    async def _run(self, task: _Task, place: Place | None) -> tuple[_Worker, Told]:
        """The worker that has done it, which must be put back, and its answer.

        ``place``: is left where the task takes long.
        """
        worker = self._take(TIMED if task.what in ("video", "audio") else PLAIN)
        try:
            await worker.give(task)
            told = await worker.answer(_QUICK_S)
            if told is None and place is not None and not place.step_aside():
                self._drop(worker)  # it begins again when there is room beside the others
                await place.wait_aside()
                return await self._run(task, place)
            told = told or await worker.answer(task.fair_s)
            if told is None:
                worker.give_way()
                told = await worker.answer(_MAX_STRETCH * task.cpu_s)
            return worker, _checked(told, task)
        except BaseException as error:
            if isinstance(error, InvalidRequest) and not worker.has_ended:
                self._put_back(worker)
            else:
                self._drop(worker)
            raise

    def _take(self, kind: bytes = PLAIN) -> _Worker:
        """A worker that is alive, as far as can be seen."""
        if self._server is not None and self._server.poll() is not None:
            logger.warning("the process that starts decoders has ended (exit code %s)", self._server.poll())
            self.close()
        if self._server is None:
            self._start_server()
        while self._idle:
            worker = self._idle.pop()
            if not worker.is_gone():
                break
            worker.close()
        else:
            worker = self._new_worker(kind)
        self._working.add(worker)
        return worker

    def _put_back(self, worker: _Worker) -> None:
        if worker not in self._working:
            return
        self._working.discard(worker)
        if worker.gives_way or len(self._idle) >= self._num_kept:
            worker.close()
        else:
            worker.trim()
            self._idle.append(worker)

    def _drop(self, worker: _Worker) -> None:
        self._working.discard(worker)
        worker.close()

    def _new_worker(self, kind: bytes = PLAIN) -> _Worker:
        assert self._control is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        worker = _Worker(ours)
        with theirs:
            try:
                socket.send_fds(self._control, [kind], [theirs.fileno(), worker.descriptor])
            except OSError as error:
                worker.close()
                raise Unavailable("no process to decode media can be started", code="decoder_lost") from error
        return worker

    def _start_server(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-P", "-m", "epd_serve.media.decoder"]
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            self._server = subprocess.Popen(
                [*program, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment | _PILLOW,
            )


class _Room:
    """Room for so much at once, taken in the order in which it is asked for."""

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, amount: int) -> AsyncGenerator[None]:
        """Hold ``amount`` within the context, or all of the room where that is less."""
        amount = min(amount, self._most)
        if amount and (self._waiting or amount > self._free):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((amount, turn))
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._give_back(amount)
                else:
                    self._waiting = deque(one for one in self._waiting if one[1] is not turn)
                    self._give_back(0)  # those behind it may fit
                raise
        else:
            self._free -= amount
        try:
            yield
        finally:
            self._give_back(amount)

    def _give_back(self, amount: int) -> None:
        self._free += amount
        while self._waiting and self._waiting[0][0] <= self._free:
            taken, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= taken
                turn.set_result(None)


@dataclass(frozen=True, slots=True)
class _Task:
    """Work for a worker.

    Attributes:
        what: the thing that is worked on, for errors.
        data, num_bytes: what it is given in its memory, and what it puts there.
        cpu_s: seconds of CPU time that it may take. fair_s: behind so many it gives way to all others.
    """

    what: str
    data: bytes
    num_bytes: int
    job: AnyJob
    cpu_s: float
    fair_s: float = _FAIR_S

    @property
    def who(self) -> str:
        """Who works on it, for errors."""
        return "compiler" if self.what == "structure" else "decoder"


def _check_not_empty(data: bytes, what: str) -> None:
    if not data:
        raise InvalidRequest(f"the {what} is empty (0 bytes)")


def _checked(told: Told | None, task: _Task) -> Told:
    """The answer. Raises what became of the task, where it is not done."""
    if told is None and task.what == "structure":  # it had time enough before it gave way: no other should try
        raise InvalidRequest(
            f"the structure was not compiled in {_MAX_STRETCH * task.cpu_s:.1f} s: {_REMEDIES[task.what]}",
            code="structure_too_complex",
        )
    if told is None:
        raise StageTimeout(
            f"the {task.who} did not come to an end in {_MAX_STRETCH * task.cpu_s:g} s", code=f"{task.who}_stalled"
        )
    if isinstance(told, Refused):
        code = f"{task.what}_too_complex" if told.code == "too_complex" else told.code
        raise InvalidRequest(told.message, code=code)
    if not isinstance(told, Ended):
        return told
    if told.code == -signal.SIGPROF:
        remedy = _REMEDIES[task.what]
        raise InvalidRequest(
            f"the {task.what} took more than {task.cpu_s:g} s of processor time: {remedy}",
            code=f"{task.what}_too_complex",
        )
    if told.code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL):
        raise InvalidRequest(
            f"the {task.what} crashes its {task.who} ({signal.Signals(-told.code).name}): send another one",
            code=f"{task.what}_crashes_{task.who}",
        )
    how = signal.Signals(-told.code).name if told.code < 0 else f"exit code {told.code}"
    raise Unavailable(
        f"the process that had the {task.what} was ended ({how}); try again", code=f"{task.who}_lost"
    )


#: For what takes too long.
_REMEDIES = {
    "image": "save it anew with any program, or scale it down",
    "video": "send a shorter or a smaller one",
    "audio": "send a shorter one, or save it as WAV or FLAC",
    "structure": "make it simpler",
}


class _Worker:
    """One process, its socket, and the memory that it shares with this one.

    Attributes:
        descriptor: of that memory.
        has_ended: it has said so.
        gives_way: to everybody else on this machine.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.descriptor = os.memfd_create("media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # A worker that a file has taken over must not pull the memory away under who reads it.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._area: mmap.mmap | None = None
        self._pid: int | None = None
        self._waiting: asyncio.Future[bool] | None = None
        self.has_ended = False
        self.gives_way = False

    @property
    def area(self) -> mmap.mmap:
        assert self._area is not None, "nothing was given"
        return self._area

    async def give(self, task: _Task) -> None:
        """Have it do something."""
        num_bytes = max(len(task.data), task.num_bytes)
        if len(task.data) > _KEPT_BYTES // 16:
            await asyncio.to_thread(self._write, task.data, num_bytes)
        else:
            self._write(task.data, num_bytes)
        given = Assignment(num_bytes=len(task.data), area_bytes=len(self.area), cpu_s=task.cpu_s, job=task.job)
        self.tell(msgspec.msgpack.encode(given))

    def tell(self, message: bytes) -> None:
        with suppress(OSError):  # it has ended, and its answer says how
            self._connection.send(message)

    async def answer(self, timeout_s: float) -> Told | None:
        """Return what it tells of its file; None where it says nothing in that time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                message = self._connection.recv(MESSAGE_BYTES)
            except BlockingIOError:
                if not await self._readable(deadline):
                    return None
                continue
            except OSError:
                message = b""
            if (told := self._heard(message)) is not None:
                return told

    async def _readable(self, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[bool] = loop.create_future()
        self._waiting = readable
        loop.add_reader(self._connection, _set, readable)
        timer = loop.call_at(deadline, _set, readable, False)
        try:
            return await readable
        finally:
            timer.cancel()
            if self.descriptor >= 0:
                loop.remove_reader(self._connection)

    def is_gone(self) -> bool:
        """Whether it has told of its end while nobody asked."""
        try:
            while self._heard(self._connection.recv(MESSAGE_BYTES)) is None:
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _heard(self, message: bytes) -> Told | None:
        """The answer in a message; None for the first one, which tells the pid before any file can do harm."""
        try:
            told = _told.decode(message) if message else Ended(1)
        except msgspec.DecodeError:  # no worker of ours says that, but a file that has taken it over
            told = Ended(-signal.SIGABRT)
        if isinstance(told, Started):
            if self._pid is None:
                self._pid = told.pid
                return None
            told = Ended(-signal.SIGABRT)
        self.has_ended = isinstance(told, Ended)
        return told

    def pixels(self, size: tuple[int, int], count: int = 1) -> NDArray[np.uint8]:
        """Return the pixels of pictures of ``size`` that it has decoded, [count, height, width, 3]."""
        if not 0 < count * CHANNELS * size[0] * size[1] <= len(self.area):  # a file that has taken the worker over
            raise InvalidRequest("the media file crashes its decoder: send another one")
        import numpy as np  # the gateway has none, and takes no pixels

        shape = count, size[1], size[0], CHANNELS
        return np.frombuffer(self.area, np.uint8, math.prod(shape)).reshape(shape)

    def samples(self, count: int) -> NDArray[np.float32]:
        """Return the samples that it has decoded, [count]."""
        import numpy as np  # the gateway has none, and takes no samples

        if not 0 < SAMPLE_BYTES * count <= len(self.area):
            raise InvalidRequest("the media file crashes its decoder: send another one")
        return np.frombuffer(self.area, np.float32, count)

    def give_way(self) -> None:
        """Take only processor time that nobody else wants."""
        self.gives_way = True
        if self._pid is not None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, _NICENESS)

    def trim(self) -> None:
        """Give memory back that few files need."""
        if len(self.area) > _KEPT_BYTES:
            self.area.madvise(mmap.MADV_REMOVE, _KEPT_BYTES)

    def close(self) -> None:
        """End it. Any number of times."""
        if self.descriptor >= 0:
            if self._waiting is not None and not self._waiting.done():  # nobody may wait for what will not be told
                self._waiting.get_loop().remove_reader(self._connection)
                self._waiting.set_result(True)
            self._connection.close()
            os.close(self.descriptor)
            self.descriptor = -1

    def _write(self, data: bytes, num_bytes: int) -> None:
        if self._area is None or len(self._area) < num_bytes:
            num_bytes += -num_bytes % mmap.PAGESIZE
            os.ftruncate(self.descriptor, num_bytes)
            self._area = mmap.mmap(self.descriptor, num_bytes)
        self._area[: len(data)] = data


def _set(future: asyncio.Future[bool], value: bool = True) -> None:
    if not future.done():
        future.set_result(value)
