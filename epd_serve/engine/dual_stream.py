"""The two streams of an instance, the tower's and the language model's (TriInfer, section 4.2).

On an accelerator each has its own stream, and the language model's has priority: an image may take a while, the
gap between two tokens may not. The host waits for features and passes them to the language model when they are
ready, so neither stream waits for the other. On a CPU each side is a thread, and running sides of all instances
divide the cores: two teams of all threads would wait for each other at every barrier.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

from device.base import BareDevice, Stream
from epd_serve.config import InstanceOptions
from epd_serve.engine.device_board import DeviceBoard, Slack, pause_s, shared_board
from epd_serve.protocol.instance_state import AppliedShare
from epd_serve.sched.schedule import ScheduleOutput

#: Priority of the language model's stream; the tower's is 0.
LANGUAGE_PRIORITY = -1
_SMOOTHING = 0.3
#: Instances that can share a board of cores.
_CORE_SLOTS = 1024
#: Longest wait of an assistant's step for encodes, so that its sequences finish under any load of images.
_MAX_HOLD_S = 1.0
#: Most tokens in a layer of an encode batch under a limit on the time per token.
_TOKENS_PER_LAYER = 2


class Cores:
    """Threads of an instance on a CPU: an equal part for each computing side of all instances.

    The sides of an instance are its language model (0) and its tower (1). The shared board has an entry per side:
    its process id while it computes, otherwise 0. Dead processes do not count.

    ``num_threads``: threads of a side that computes alone.
    """

    def __init__(self, device: BareDevice, num_threads: int, board: Path | None, name: str) -> None:
        """Raises OSError if the file cannot be created."""
        self._device = device
        self._num_threads = num_threads
        self._pids = memoryview(shared_board(board, _CORE_SLOTS * 2 * 8)).cast("q")
        self._first = 2 * (crc32(name.encode()) % _CORE_SLOTS)
        self._pids[self._first] = self._pids[self._first + 1] = 0

    def begin(self, side: int) -> None:
        """Mark a side as computing on this thread and set its number of threads."""
        self._pids[self._first + side] = own = os.getpid()
        pids = filter(None, self._pids.tolist())
        num_sides = sum(pid == own or Path(f"/proc/{pid}").exists() for pid in pids)
        self._device.set_threads(max(1, self._num_threads // num_sides))

    def end(self, side: int) -> None:
        self._pids[self._first + side] = 0


class _Side:
    """A stream of an instance and, on a CPU, the instance's cores."""

    _side = 0

    def __init__(self, device: BareDevice, stream: Stream, cores: Cores | None) -> None:
        self.device = device
        self.stream = stream
        self._cores = cores

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Allocate weights, KV memory or graphs on this stream, from any thread; completed at the end."""
        self.device.activate()
        with self.stream:
            yield
        self.stream.synchronize()

    def _take_cores(self) -> None:
        if self._cores is not None:
            self._cores.begin(self._side)

    def _leave_cores(self) -> None:
        if self._cores is not None:
            self._cores.end(self._side)


class TowerStream(_Side):
    """The tower's side. Methods up to ``between_layers`` belong to the tower's thread.

    Args:
        share: fraction of the multiprocessors; None: no limit.

    Attributes:
        hurries: set while the instance shuts down: encodes no longer pause for decodes.
        paused_s: total seconds that running encodes have paused for decodes.
        is_wanted: True while items are being prepared, waiting or encoded.
        changed: wakes the encoder, which clears it: a new item, or :meth:`may_start` may return another result.
        held_on: the encoder's event loop while its items wait for :meth:`may_start`, else None.
    """

    _side = 1

    def __init__(
        self,
        device: BareDevice,
        board: DeviceBoard,
        *,
        priority: int = 0,
        share: float | None = None,
        cores: Cores | None = None,
        language: LanguageStream | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(device, device.stream(priority, share), cores)
        self._board = board
        self._language = language
        self._clock = clock
        self._sleep = sleep
        self._resumed_s = self.paused_s = 0.0
        self._num_layers = 0
        self._is_encoding = self.hurries = self.is_wanted = False
        self.changed = asyncio.Event()
        self.held_on: asyncio.AbstractEventLoop | None = None
        self._pixel_bytes: float | None = None
        self._pixel_layer_s: float | None = None

    @contextmanager
    def encoding(self, num_pixels: int) -> Iterator[None]:
        """Encode a batch within this context; its features are complete at the end."""
        self.device.activate()
        in_use = self.device.reset_peak_memory()
        self._num_layers, paused_s = 0, self.paused_s
        began_s = self._resumed_s = self._clock()
        self._take_cores()
        self._board.encode_begins()
        self._is_encoding = True
        try:
            with self.stream:
                yield
        finally:
            self._is_encoding = False
            self._board.encode_ends()
            self._leave_cores()
        seconds = self._clock() - began_s - (self.paused_s - paused_s)
        pixel_bytes = max((self.device.peak_memory() - in_use) / num_pixels, 0.0)
        self._pixel_bytes = _smooth(self._pixel_bytes, pixel_bytes)
        self._pixel_layer_s = _smooth(self._pixel_layer_s, seconds / max(self._num_layers, 1) / num_pixels)

    def between_layers(self) -> None:
        """Pause before a layer of the tower while decodes lack slack. Does nothing outside a batch."""
        if not self._is_encoding:
            return
        self._num_layers += 1
        self._take_cores()
        if self._board.slack() is None:
            self._resumed_s = self._clock()
            return
        self.stream.synchronize()  # otherwise earlier layers would still be running
        begun = now = self._clock()
        piece_s = begun - self._resumed_s
        while (
            not self.hurries
            and (wait_s := pause_s(self._board.slack(), piece_s=piece_s, paused_s=now - begun)) > 0
        ):
            self._board.encode_ends()
            self._sleep(wait_s)
            now = self._clock()
        self.paused_s += now - begun
        self._resumed_s = now
        if not self._board.encodes_here:
            self._board.encode_begins()

    # ------------------------------------------------------------------ asked on the event loop

    def batch_bytes(self, num_pixels: int) -> int:
        """Return the measured memory of a batch without weights."""
        return int(num_pixels * (self._pixel_bytes or 0.0))

    def max_pixels(self) -> int:
        """Return the largest batch that fits the free memory and any time limit, by the measurements so far."""
        if self._pixel_bytes is None or self._pixel_layer_s is None:
            return 0  # one item, to measure
        limit = float("inf")
        if self._pixel_bytes > 0:
            limit = self.device.headroom() / self._pixel_bytes
        if (slack := self._board.slack()) is not None and self._pixel_layer_s > 0:
            limit = min(limit, _TOKENS_PER_LAYER * slack.limit_s / self._pixel_layer_s)
        return int(min(max(limit, 0), 1 << 62))

    def may_start(self, num_pixels: int) -> bool:
        """Return whether an item's activations fit the free memory, by the measurements so far.

        An item that does not fit may start once the language model is idle, because no more memory would be freed.
        """
        if self._pixel_bytes is None or self._language is None or not self._language.is_busy:
            return True
        return num_pixels * self._pixel_bytes <= self.device.headroom()

    def reconsider(self) -> None:
        """Check :meth:`may_start` again if items are held. Any thread may call it while the event loop is open."""
        if (loop := self.held_on) is not None:
            loop.call_soon_threadsafe(self.changed.set)


class LanguageStream(_Side):
    """The language model's side; its methods belong to the engine's thread.

    Attributes:
        is_busy: True while a step runs, or if the last step has decodes to continue.
        slack: time that decodes leave for encodes; None without a limit on the time per token.
        tower: the instance's other side, whose held encodes look again after each step.
        assists: whether the tower's encodes precede steps.
    """

    def __init__(
        self,
        device: BareDevice,
        board: DeviceBoard,
        *,
        limit_s: float | None,
        cores: Cores | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # served before a tower's; on an NPU the default stream, the only one that its limits cover
        stream = device.current_stream() if device.type == "npu" else device.stream(LANGUAGE_PRIORITY)
        super().__init__(device, stream, cores)
        self._board = board
        self.slack = None if limit_s is None else Slack(limit_s=limit_s)
        self._clock = clock
        self._last_s: float | None = None  # end of the last step if its decodes continue
        self._encoded_s = 0.0
        self.is_busy = False
        self.tower: TowerStream | None = None
        self.assists = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step within this context; call :meth:`stepped` afterwards unless it fails.

        An assistant's encodes go first, for at most a second.
        """
        if self.assists and self.tower is not None and self.tower.is_wanted:
            self.idle()
            end_s = self._clock() + _MAX_HOLD_S
            while self.tower.is_wanted and self._clock() < end_s:
                time.sleep(0.002)
        self.is_busy = True
        self._take_cores()
        if self.slack is not None and self._last_s is None:
            self._encoded_s = self._board.encoded_s()
        try:
            yield
        except BaseException:
            self.idle()
            raise

    def stepped(self, output: ScheduleOutput, seconds: float, num_running: int) -> None:
        """Record a step of ``seconds`` after which ``num_running`` sequences continue."""
        self.is_busy = bool(output.decodes) and num_running > 0
        if not self.is_busy:
            self._leave_cores()
        if self.slack is not None:
            self._update_slack(output, seconds)
        if self.tower is not None:
            self.tower.reconsider()

    def _update_slack(self, output: ScheduleOutput, seconds: float) -> None:
        assert self.slack is not None
        now, encoded_s = self._clock(), self._board.encoded_s()
        if output.decodes:
            since_last = seconds if self._last_s is None else now - self._last_s
            self.slack = self.slack.after(since_last, encoded_s - self._encoded_s)
        self._encoded_s = encoded_s
        if self.is_busy:
            self._last_s = now
            self._board.decodes(self.slack)
        else:
            self._last_s = None
            self._board.decodes_end()

    def idle(self) -> None:
        """Mark the side idle: all sequences wait for features or blocks, or have ended."""
        if self.is_busy:
            self.is_busy, self._last_s = False, None
            self._leave_cores()
            self._board.decodes_end()
        if self.tower is not None:
            self.tower.reconsider()


class DualStream:
    """Both streams of one instance. ``share``: share of the device applied to this process; None: no limit."""

    def __init__(self, options: InstanceOptions, device: BareDevice) -> None:
        """Apply the share. Raises ValueError for one that the device cannot give."""
        self.share: AppliedShare | None = None
        if (whole := options.device_share) is not None:
            partition = device.apply_share(whole.share, whole.start)
            self.share = AppliedShare(whole.share, partition.strength, list(partition.mechanisms))
            if options.threads is not None:
                device.set_threads(options.threads)
        if options.memory_share is not None:
            device.set_memory_fraction(options.memory_share)
        cores = None
        if device.type == "cpu" and options.threads is not None:
            cores = Cores(device, options.threads, options.core_board, options.name)
        limit_s = None if options.slo.tpot_ms is None else options.slo.tpot_ms / 1000
        board, slot = options.device_board.rsplit(":", 1) if options.device_board else (None, "0")
        self.board = DeviceBoard(None if board is None else Path(board), int(slot), time.monotonic)
        self.language = LanguageStream(device, self.board, limit_s=limit_s, cores=cores)
        self.tower = TowerStream(
            device,
            self.board,
            share=options.tower_share if options.role.has_language_model else None,
            cores=cores,
            language=self.language if options.role.has_language_model else None,
        )
        self.language.tower, self.language.assists = self.tower, options.assist


def _smooth(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SMOOTHING * (value - mean)
