"""The processes that decode media files and try grammars: one that forks, and its workers, each with one job.

``python -P -m epd_serve.media.decoder FD PARENT_PID`` loads the decoders, and then forks a worker for each pair of
descriptors that arrives on the inherited socket: the worker's own socket, and the memory through which files come
in and pixels go out. PyAV is loaded before the first worker that is to read a video or a sound. A file that takes
too long, or too much memory, ends its worker and nothing else. All of them end with the process that started them.
:mod:`epd_serve.media.decoder_pool` is the other side.

Messages are msgpack: the process that forks tells the worker's pid before the worker says anything, and at last on
the same socket how the worker has ended; in between the worker answers each job. A video's frames come as many at
a time as have room in the memory; the worker goes on once it is told to. Who closes that socket has the worker
killed.
"""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from PIL import Image

from epd_serve.errors import InvalidRequest
from epd_serve.lifeline import die_with_parent
from epd_serve.media.audio import AudioLimits, read_audio_facts, read_samples
from epd_serve.media.picture import MediaLimits, low_detail_size, open_image
from epd_serve.media.video import VideoLimits, load_pyav, read_facts, read_frames
from epd_serve.types import AudioFacts, VideoFacts, grammar_problem

MESSAGE_BYTES = 1 << 16
CHANNELS = 3
SAMPLE_BYTES = 4
#: Asks for a worker; for one that reads videos and sounds.
PLAIN, TIMED = b"w", b"v"
#: Memory for a picture's decoder: coefficients, frames, copies in other modes; and for what has no pixels.
_BYTES_PER_PIXEL = 32
_ROOM_BYTES = 64 * 1024**2
#: Frames that a video's decoder keeps for reference, those of its threads and FFmpeg's own tables.
_BYTES_PER_FRAME_PIXEL = 96
_VIDEO_ROOM_BYTES = 256 * 1024**2
#: FFmpeg's tables, and frames of a sound.
_AUDIO_ROOM_BYTES = 256 * 1024**2
#: The same for a grammar.
_BYTES_PER_CHARACTER = 1024
_GRAMMAR_ROOM_BYTES = 256 * 1024**2
#: How much of a text is tried, and the work that one byte of it may take: a tenth of a token's, which has several.
_WALK_BYTES, _WALK_FUEL = 32, 20_000
#: Problems whose messages have room in an answer.
_MAX_PROBLEMS = 100
#: Pixels are copied out so many at a time, through memory that the process has already.
_STRIP_PIXELS = 1 << 15


class PictureJob(msgspec.Struct, frozen=True, kw_only=True, tag="picture"):
    """A picture to decode to RGB, ``width`` × ``height`` pixels as displayed.

    ``low_detail``: that is the size to which it is scaled down.
    """

    width: int
    height: int
    low_detail: bool
    limits: MediaLimits


class GrammarJob(msgspec.Struct, frozen=True, tag="grammar"):
    """Grammars to compile, which takes as long for any tokenizer, and to forget: a JSON list of texts."""


class FactsJob(msgspec.Struct, frozen=True, tag="facts"):
    """A video whose facts are to be read."""

    limits: VideoLimits


class VideoJob(msgspec.Struct, frozen=True, kw_only=True, tag="video"):
    """A video of which the frames ``indices`` are to be decoded, ``num_at_once`` at a time."""

    facts: VideoFacts
    indices: list[int]
    num_at_once: int


class AudioFactsJob(msgspec.Struct, frozen=True, tag="audio_facts"):
    """A sound whose facts are to be read."""

    limits: AudioLimits


class AudioJob(msgspec.Struct, frozen=True, tag="audio"):
    """A sound to decode to one channel at ``rate`` samples a second."""

    facts: AudioFacts
    rate: int


AnyJob = PictureJob | GrammarJob | FactsJob | VideoJob | AudioFactsJob | AudioJob


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A job on a file, which lies at the beginning of the memory; what is made of it takes its place.

    Attributes:
        num_bytes: of the file. area_bytes: of the memory.
        cpu_s: seconds of CPU time after which the worker is ended.
    """

    num_bytes: int
    area_bytes: int
    cpu_s: float
    job: AnyJob


class Started(msgspec.Struct, frozen=True, tag="started"):
    pid: int


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """The pixels or samples are there."""


class Problem(msgspec.Struct, frozen=True):
    """Why a grammar cannot be followed. ``is_complex``: it can be read, and takes too much."""

    message: str
    is_complex: bool


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """The grammars were compiled, but for those that have a problem, by their places. ``cpu_s``: what it took."""

    problems: dict[int, Problem]
    cpu_s: float


class Facts(msgspec.Struct, frozen=True, tag="facts"):
    facts: VideoFacts


class HeardFacts(msgspec.Struct, frozen=True, tag="audio_facts"):
    facts: AudioFacts


class Frames(msgspec.Struct, frozen=True, tag="frames"):
    """So many more frames are there, from the memory's beginning on."""

    count: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """There is something wrong with the file."""

    message: str
    code: str | None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The worker's exit code, or minus the signal that ended it."""

    code: int


Told = Started | Decoded | Compiled | Facts | HeardFacts | Frames | Refused | Ended
#: What lets a worker go on, once the frames that are there have been read.
GO_ON = b"g"
_assignments = msgspec.msgpack.Decoder(Assignment)


def serve(control: socket.socket) -> None:
    """Fork workers until the other side is gone; a worker never returns from here."""
    poll, workers = select.poll(), _Workers()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                message, given, _, _ = socket.recv_fds(control, 1, 2)
                if not message:
                    workers.end()
                    return
                if message == TIMED:
                    with suppress(InvalidRequest):  # a worker says so
                        load_pyav("media")
                for number, events in workers.fork(socket.socket(fileno=given[0]), given[1]).items():
                    poll.register(number, events)
            else:
                for number in workers.look_at(descriptor):
                    poll.unregister(number)


class _Workers:
    """The workers that run: by pidfd, and by the descriptor of the socket that each was given."""

    def __init__(self) -> None:
        self._pids: dict[int, tuple[int, socket.socket]] = {}
        self._watches: dict[int, int] = {}

    def fork(self, connection: socket.socket, area: int) -> dict[int, int]:
        """Fork a worker; return what to poll from now on, and for which events."""
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            _tell(connection, Ended(1))
            connection.close()
            os.close(area)
            return {}
        if pid == 0:
            _become_worker(parent, connection, area)
        os.close(area)
        _tell(connection, Started(pid))
        watch = os.pidfd_open(pid)
        self._pids[watch], self._watches[connection.fileno()] = (pid, connection), watch
        return {watch: select.POLLIN, connection.fileno(): 0}  # the latter for its other end's close alone

    def end(self) -> None:
        """End all; none is left to be reaped by others."""
        for pid, _ in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def look_at(self, descriptor: int) -> tuple[int, ...]:
        """A worker has ended, or is to; descriptors to poll no more."""
        if (watch := self._watches.pop(descriptor, None)) is not None:
            os.kill(self._pids[watch][0], signal.SIGKILL)
            return (descriptor,)
        if descriptor not in self._pids:
            return ()
        pid, connection = self._pids.pop(descriptor)
        _tell(connection, Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        is_polled = self._watches.pop(connection.fileno(), None) is not None
        done = (descriptor, connection.fileno()) if is_polled else (descriptor,)
        connection.close()
        os.close(descriptor)
        return done


def _become_worker(parent: int, connection: socket.socket, area: int) -> None:
    code = 1
    try:
        die_with_parent(parent)
        kept = sorted((connection.fileno(), area))
        os.closerange(3, kept[0])
        os.closerange(kept[0] + 1, kept[1])
        os.closerange(kept[1] + 1, 1 << 20)
        _work(connection, area)
        code = 0
    finally:
        os._exit(code)


def _work(connection: socket.socket, area: int) -> None:
    memory: mmap.mmap | None = None
    while message := connection.recv(MESSAGE_BYTES):
        given = _assignments.decode(message)
        if memory is None or len(memory) != given.area_bytes:
            memory = mmap.mmap(area, given.area_bytes)
        answer: Told = Decoded()
        job, data = given.job, memory[: given.num_bytes]
        try:
            if isinstance(job, FactsJob | VideoJob | AudioFactsJob | AudioJob):
                load_pyav("media")  # takes as long as a small video
            signal.setitimer(signal.ITIMER_PROF, given.cpu_s)
            if isinstance(job, GrammarJob):
                answer = _compile(msgspec.json.decode(data, type=list[str]))
            elif isinstance(job, FactsJob):
                _limit_memory(_video_bytes(data, job.limits.max_pixels))
                answer = Facts(read_facts(data, job.limits))
            elif isinstance(job, VideoJob):
                _decode_video(job, data, memory, connection)
            elif isinstance(job, AudioFactsJob):
                _limit_memory(_AUDIO_ROOM_BYTES + 2 * len(data))
                answer = HeardFacts(read_audio_facts(data, job.limits))
            elif isinstance(job, AudioJob):
                _decode_audio(job, data, memory)
            else:
                _decode(job, data, memory)
        except InvalidRequest as error:
            answer = Refused(error.message, error.code)
        except MemoryError:
            answer = Refused("it takes far more memory than its size explains", "too_complex")
        signal.setitimer(signal.ITIMER_PROF, 0)
        del data  # it may be large, and who waits for the next one needs it no more
        _limit_memory(None)
        _tell(connection, answer)


def _decode(job: PictureJob, data: bytes, memory: mmap.mmap) -> None:
    """Put the pixels where the file was. Raises InvalidRequest."""
    image = open_image(
        data,
        job.limits,
        lambda num_pixels: _limit_memory(_ROOM_BYTES + 2 * len(data) + num_pixels * _BYTES_PER_PIXEL),
    )
    if job.low_detail:
        image = image.resize(low_detail_size(image.size), Image.Resampling.BICUBIC)
    if image.size != (job.width, job.height):
        raise InvalidRequest(
            f"the image decodes to {image.size[0]}x{image.size[1]} pixels and its header says "
            f"{job.width}x{job.height}"
        )
    rows = max(1, _STRIP_PIXELS // job.width)
    for top in range(0, job.height, rows):
        bottom = min(top + rows, job.height)
        strip = image if rows >= job.height else image.crop((0, top, job.width, bottom))
        memory[CHANNELS * job.width * top : CHANNELS * job.width * bottom] = strip.tobytes()


def _decode_video(job: VideoJob, data: bytes, memory: mmap.mmap, connection: socket.socket) -> None:
    """Put the frames where the file was, as many at a time as were asked for. Raises InvalidRequest."""
    num_bytes, count = CHANNELS * job.facts.width * job.facts.height, 0
    for frame in read_frames(
        data, job.facts, job.indices, lambda num_pixels: _limit_memory(_video_bytes(data, num_pixels))
    ):
        if count == job.num_at_once:
            _tell(connection, Frames(count))
            count = 0
            if not connection.recv(MESSAGE_BYTES):
                return
        memory[num_bytes * count : num_bytes * (count + 1)] = frame.tobytes()
        count += 1
    _tell(connection, Frames(count))
    connection.recv(MESSAGE_BYTES)


def _decode_audio(job: AudioJob, data: bytes, memory: mmap.mmap) -> None:
    """Put the samples where the file was, float32. Raises InvalidRequest."""
    _limit_memory(_AUDIO_ROOM_BYTES + 2 * len(data))
    position, end = 0, SAMPLE_BYTES * job.facts.count_at(job.rate)
    for samples in read_samples(data, job.facts, job.rate):
        piece = samples.tobytes()[: end - position]
        memory[position : position + len(piece)] = piece
        position += len(piece)
    memory[position:end] = bytes(end - position)


def _video_bytes(data: bytes, num_pixels: int) -> int:
    return _VIDEO_ROOM_BYTES + 2 * len(data) + num_pixels * _BYTES_PER_FRAME_PIXEL


def _compile(texts: list[str]) -> Compiled:
    """Raises InvalidRequest where many have a problem."""
    import llguidance  # the gateway has none, and compiles no grammar

    start_s = time.process_time()
    _limit_memory(_GRAMMAR_ROOM_BYTES + _BYTES_PER_CHARACTER * sum(map(len, texts)))
    tokenizer, limits = llguidance.LLTokenizer("byte"), llguidance.LLParserLimits(step_lexer_fuel=_WALK_FUEL)
    problems: dict[int, Problem] = {}
    for place, text in enumerate(texts):
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        is_complex = not matcher.is_error()
        if is_complex:
            _walk(matcher, tokenizer)
        if matcher.is_error():
            problems[place] = Problem(grammar_problem(matcher.get_error()), is_complex)
        if len(problems) > _MAX_PROBLEMS:
            raise InvalidRequest(f"{len(problems)} schemas or patterns cannot be enforced", code="too_complex")
    return Compiled(problems, time.process_time() - start_s)


def _walk(matcher: Any, tokenizer: Any) -> None:
    """Write the beginning of a text: some grammars leave all work to that."""
    random = Random(0)
    for _ in range(_WALK_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        mask &= ~(1 << tokenizer.eos_token)
        allowed = [token for token in range(tokenizer.vocab_size) if mask >> token & 1]
        if matcher.is_error() or not allowed:
            return
        matcher.consume_token(random.choice(allowed))


def _limit_memory(num_bytes: int | None) -> None:
    """From now on this process gets no more than so many bytes beyond what it has; None: as many as there are."""
    limit = resource.RLIM_INFINITY
    if num_bytes is not None:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + num_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = hard if limit == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _tell(connection: socket.socket, message: Told) -> None:
    with suppress(OSError):  # the other side is gone
        connection.send(msgspec.msgpack.encode(message))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started this process ends it
    Image.init()
    with suppress(ImportError):  # once for all workers
        importlib.import_module("llguidance")
    serve(control)
    os._exit(0)


if __name__ == "__main__":
    main()
