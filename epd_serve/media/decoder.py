"""Decode untrusted files in worker processes, forked from a process with the decoders loaded.

``python -P -m epd_serve.media.decoder FD PARENT_PID`` forks a worker for each message on its inherited socket. A
message names the libraries to load before forking, and carries two descriptors: the worker's socket, and the
shared memory for the file and its pixels. The worker handles one :class:`Assignment` at a time from its socket and
answers there. A file that takes too much time or memory ends only its worker; closing the other end of the socket
kills it. :mod:`epd_serve.media.decoder_pool` is the client.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgspec
from PIL import Image

from epd_serve.errors import InvalidRequest
from epd_serve.lifeline import die_with_parent
from epd_serve.media.audio import AudioLimits, read_audio_facts, read_samples
from epd_serve.media.picture import MediaLimits, low_detail_size, open_image, pixel_size
from epd_serve.media.video import VideoLimits, read_facts, read_frames, read_list, unpack_frames
from epd_serve.types import AudioFacts, VideoFacts, grammar_problem

MESSAGE_BYTES = 1 << 16
CHANNELS = 3
SAMPLE_BYTES = 4
#: Memory for decoding an image: per pixel (coefficients, frames, copies in other modes), and fixed.
_BYTES_PER_PIXEL = 32
_ROOM_BYTES = 64 * 1024**2
#: Memory for decoding a video: reference frames, frames in threads, and FFmpeg's per-frame tables.
_BYTES_PER_FRAME_PIXEL = 96
#: Fixed memory for FFmpeg (tables, audio frames) and for a grammar's tables.
_FFMPEG_ROOM_BYTES = _GRAMMAR_ROOM_BYTES = 256 * 1024**2
_BYTES_PER_CHARACTER = 1024
#: Bytes of text to try a compiled grammar on, and the lexer's fuel per byte: a tenth of that per token.
_WALK_BYTES, _WALK_FUEL = 32, 20_000
#: Number of problems that fit into an answer.
_MAX_PROBLEMS = 100
#: Pixels to copy out at a time, reusing memory that the process already has.
_STRIP_PIXELS = 1 << 15


class PictureJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode an image to RGB. ``size`` is its displayed size, or its size after ``low_detail`` scaling."""

    libraries: ClassVar[bytes] = b"PIL.Image"
    size: tuple[int, int]
    low_detail: bool
    limits: MediaLimits

    def work(self, data: bytes, memory: mmap.mmap, connection: socket.socket) -> None:
        def give_room(num_pixels: int) -> None:
            _limit_memory(_ROOM_BYTES + 2 * len(data) + num_pixels * _BYTES_PER_PIXEL)

        give_room(0)
        image = open_image(data, self.limits, give_room)
        if self.low_detail:
            image = image.resize(low_detail_size(image.size), Image.Resampling.BICUBIC)
        width, height = self.size
        if image.size != self.size:
            raise InvalidRequest(
                f"the image decodes to {image.size[0]}x{image.size[1]} pixels but its header says {width}x{height}"
            )
        rows = max(1, _STRIP_PIXELS // width)
        for top in range(0, height, rows):
            bottom = min(top + rows, height)
            strip = image if rows >= height else image.crop((0, top, width, bottom))
            memory[CHANNELS * width * top : CHANNELS * width * bottom] = strip.tobytes()


class SizeJob(msgspec.Struct, frozen=True, tag=True):
    """Read the size of an image."""

    libraries: ClassVar[bytes] = b"PIL.Image"
    limits: MediaLimits

    def work(self, data: bytes, memory: mmap.mmap, connection: socket.socket) -> tuple[int, int]:
        _limit_memory(_ROOM_BYTES + 2 * len(data))
        return pixel_size(data, self.limits)


class VideoFactsJob(msgspec.Struct, frozen=True, tag=True):
    """Read the facts of a video, or of a frame list with ``list_fps`` frames per second."""

    libraries: ClassVar[bytes] = b"av"
    limits: VideoLimits
    list_fps: float | None = None

    def work(self, data: bytes, memory: mmap.mmap, connection: socket.socket) -> VideoFacts:
        if self.list_fps is not None:
            _limit_memory(_ROOM_BYTES + 4 * len(data))
            return read_list(unpack_frames(data), self.list_fps, self.limits)
        _limit_memory(_video_bytes(data, self.limits.max_pixels))
        return read_facts(data, self.limits)


class AudioFactsJob(msgspec.Struct, frozen=True, tag=True):
    """Read the facts of an audio file."""

    libraries: ClassVar[bytes] = b"av"
    limits: AudioLimits

    def work(self, data: bytes, memory: mmap.mmap, connection: socket.socket) -> AudioFacts:
        _limit_memory(_FFMPEG_ROOM_BYTES + 2 * len(data))
        return read_audio_facts(data, self.limits)


class VideoJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode the video frames ``indices``, ``num_at_once`` at a time."""

    libraries: ClassVar[bytes] = b"av numpy"
    facts: VideoFacts
    indices: list[int]
    num_at_once: int

    def work(self, data: bytes, memory: mmap.mmap, connection: socket.socket) -> None:
        num_pixels, count = self.facts.width * self.facts.height, 0
        num_bytes = CHANNELS * num_pixels
        _limit_memory(_video_bytes(data, num_pixels))
        for frame in read_frames(data, self.facts, self.indices):
            if count == self.num_at_once:
                _hand_over(connection, count)
                count = 0
            memory[num_bytes * count : num_bytes * (count + 1)] = frame.tobytes()
            count += 1
        _hand_over(connection, count)


class AudioJob(msgspec.Struct, frozen=True, tag=True):
    """Decode audio to one channel of float32 at ``rate`` samples per second, padded with silence at the end."""

    libraries: ClassVar[bytes] = b"av numpy"
    facts: AudioFacts
    rate: int

    def work(self, data: bytes, memory: mmap.mmap, connection: socket.socket) -> None:
        _limit_memory(_FFMPEG_ROOM_BYTES + 2 * len(data))
        position, end = 0, SAMPLE_BYTES * self.facts.count_at(self.rate)
        for samples in read_samples(data, self.facts, self.rate):
            piece = samples.tobytes()[: end - position]
            memory[position : position + len(piece)] = piece
            position += len(piece)
        memory[position:end] = bytes(end - position)


class Problem(msgspec.Struct, frozen=True):
    """Reason why a grammar cannot be enforced. ``is_complex``: it is valid but exceeds a limit."""

    message: str
    is_complex: bool


class Compiled(msgspec.Struct, frozen=True):
    """Problems of grammars by position, and the CPU seconds for compiling all of the grammars."""

    problems: dict[int, Problem]
    cpu_s: float


class GrammarJob(msgspec.Struct, frozen=True, tag=True):
    """Compile the grammars in the file, a JSON list of texts. The time does not depend on the tokenizer."""

    libraries: ClassVar[bytes] = b"llguidance"

    def work(self, data: bytes, memory: mmap.mmap, connection: socket.socket) -> Compiled:
        import llguidance  # not installed at the gateway, which compiles no grammars

        start_s, texts = time.process_time(), msgspec.json.decode(data, type=list[str])
        _limit_memory(_GRAMMAR_ROOM_BYTES + _BYTES_PER_CHARACTER * sum(map(len, texts)))
        tokenizer, limits = llguidance.LLTokenizer("byte"), llguidance.LLParserLimits(step_lexer_fuel=_WALK_FUEL)
        problems: dict[int, Problem] = {}
        for position, text in enumerate(texts):
            matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
            is_complex = not matcher.is_error()
            if is_complex:
                _walk(matcher, tokenizer)
            if matcher.is_error():
                problems[position] = Problem(grammar_problem(matcher.get_error()), is_complex)
            if len(problems) > _MAX_PROBLEMS:
                raise InvalidRequest(f"{len(problems)} schemas or patterns cannot be enforced", code="too_complex")
        return Compiled(problems, time.process_time() - start_s)


AnyJob = PictureJob | SizeJob | VideoFactsJob | AudioFactsJob | VideoJob | AudioJob | GrammarJob


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A job on the file at the start of the shared memory; pixels or samples overwrite the file.

    Attributes:
        num_bytes: size of the file.
        area_bytes: size of the shared memory.
        cpu_s: CPU seconds after which the worker is killed.
        niceness: increment of the worker's niceness.
    """

    num_bytes: int
    area_bytes: int
    cpu_s: float
    niceness: int
    job: AnyJob


class Done(msgspec.Struct, frozen=True, tag=True):
    """Result of the job; None if it is in the shared memory."""

    result: Any = None


class Frames(msgspec.Struct, frozen=True, tag=True):
    """``count`` more frames are at the start of the shared memory."""

    count: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The file cannot be used."""

    message: str
    code: str | None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The worker ended with this exit code, or by the signal ``-code``."""

    code: int


Told = Done | Frames | Refused | Ended
#: Lets a worker overwrite the frames in the shared memory with the next ones.
GO_ON = b"g"


def serve(control: socket.socket) -> None:
    """Fork workers until the other end of ``control`` is closed; never returns in a worker."""
    workers: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    pids: dict[int, int] = {}  # of workers with an open socket, by its descriptor
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == control.fileno():
                libraries, given, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
                if not libraries:
                    return
                with suppress(ImportError):  # the worker reports it
                    for name in libraries.decode().split():
                        importlib.import_module(name)
                if (started := _start(given)) is None:
                    continue
                pid, watch, connection = started
                workers[watch], pids[connection.fileno()] = (pid, connection), pid
                poll.register(watch, select.POLLIN)
                poll.register(connection, 0)  # only to notice that the other end closes
            elif descriptor in workers:
                pid, connection = workers.pop(descriptor)
                _tell(connection, Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                poll.unregister(descriptor)
                os.close(descriptor)
                if pids.pop(connection.fileno(), None) is not None:
                    poll.unregister(connection)
                connection.close()
            elif descriptor in pids:
                poll.unregister(descriptor)
                os.kill(pids.pop(descriptor), signal.SIGKILL)


def _start(given: list[int]) -> tuple[int, int, socket.socket] | None:
    """Fork a worker that has these descriptors; return its pid, its pidfd, and the socket.

    Without memory or descriptors for it, close the given ones, which tells the client, and return None.
    """
    pid = 0
    try:
        connection, area = given  # fewer have arrived if this process may open no more
        pid = _fork(connection, area)
        os.close(given.pop())
        return pid, os.pidfd_open(pid), socket.socket(fileno=connection)
    except (OSError, ValueError) as error:
        print(f"cannot start a process to decode media: {error}", file=sys.stderr)
        for descriptor in given:
            os.close(descriptor)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return None


def _fork(descriptor: int, area: int) -> int:
    parent = os.getpid()
    gc.freeze()
    if pid := os.fork():
        return pid
    try:
        die_with_parent(parent)
        connection = socket.socket(fileno=descriptor)
        kept = sorted((descriptor, area))
        os.closerange(3, kept[0])
        os.closerange(kept[0] + 1, kept[1])
        os.closerange(kept[1] + 1, 1 << 20)
        memory: mmap.mmap | None = None
        while message := connection.recv(MESSAGE_BYTES):
            assignment = msgspec.msgpack.decode(message, type=Assignment)
            os.nice(assignment.niceness)
            if memory is None or len(memory) != assignment.area_bytes:
                memory = mmap.mmap(area, assignment.area_bytes)
            signal.setitimer(signal.ITIMER_PROF, assignment.cpu_s)
            answer: Told
            try:
                answer = Done(assignment.job.work(memory[: assignment.num_bytes], memory, connection))
            except InvalidRequest as error:
                answer = Refused(error.message, error.code)
            except MemoryError:
                answer = Refused("it needs far more memory than its size justifies", "too_complex")
            except Exception as error:  # noqa: BLE001 - another instance would fail too
                _limit_memory(None)
                traceback.print_exc()
                answer = Refused(f"it cannot be processed: {type(error).__name__}", None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _limit_memory(None)
            _tell(connection, answer)
    finally:
        os._exit(0)


def _video_bytes(data: bytes, num_pixels: int) -> int:
    return _FFMPEG_ROOM_BYTES + 2 * len(data) + num_pixels * _BYTES_PER_FRAME_PIXEL


def _hand_over(connection: socket.socket, count: int) -> None:
    """Announce frames, and return when the client has read them."""
    _tell(connection, Frames(count))
    if not connection.recv(MESSAGE_BYTES):
        os._exit(0)


def _walk(matcher: Any, tokenizer: Any) -> None:
    """Generate the first bytes of a text, since some grammars do their work only then."""
    random = Random(0)
    for _ in range(_WALK_BYTES):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        mask &= ~(1 << tokenizer.eos_token)
        allowed = [token for token in range(tokenizer.vocab_size) if mask >> token & 1]
        if matcher.is_error() or not allowed:
            return
        matcher.consume_token(random.choice(allowed))


def _limit_memory(num_bytes: int | None) -> None:
    """Limit this process to ``num_bytes`` more memory than it has now; None removes the limit."""
    limit = hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if num_bytes is not None:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + num_bytes
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _tell(connection: socket.socket, message: Told) -> None:
    with suppress(OSError):  # the client is gone
        connection.send(msgspec.msgpack.encode(message))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the parent ends this process
    Image.init()
    with suppress(ImportError):  # an older Pillow
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # the stacks of one thread per core exceed the memory limit
    serve(control)
    os._exit(0)


if __name__ == "__main__":
    main()
