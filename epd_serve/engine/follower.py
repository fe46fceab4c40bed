"""A rank of a tensor-parallel instance that is not its first: ``python -m epd_serve.engine.follower FD``.

It computes its share of each step that the leader sends over the inherited socket, and ends with the leader.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import assert_never

import torch
import transformers

from device.base import Device, Event
from device.distributed import ProcessGroup
from device.registry import get_device
from epd_serve.engine.commands import (
    Beside,
    Command,
    CopyBlock,
    CopyCells,
    CreateCache,
    Created,
    Done,
    Join,
    Joined,
    Leave,
    MapKV,
    UnmapKV,
    WriteKV,
    follower_end,
)
from epd_serve.engine.device_board import apply_share
from epd_serve.engine.dual_stream import language_stream
from epd_serve.engine.kv_memory import KVCache
from epd_serve.engine.step import StepExecutor
from epd_serve.engine.step_inputs import StepInputs
from epd_serve.models.language import LanguageModel
from epd_serve.protocol.wire import Region
from epd_serve.rpc.link import Link, LinkClosed
from epd_serve.transfer.kv_sender import RemoteWrite
from epd_serve.transfer.shared_memory import MAPPED_SLOT, WriteLocks, map_region
from epd_serve.transfer.transport import TransferError

logger = logging.getLogger(__name__)


class Follower:
    """Carries the leader's commands out, one after the other; the cache is created before it is used.

    KV alone is copied beside the steps, on a thread of its own: that of the first layers is sent while the next
    ones are computed.
    """

    def __init__(self, join: Join, link: Link[Command]) -> None:
        self._link = link
        if join.threads is not None:
            get_device("cpu").set_threads(join.threads)
        self._device: Device = get_device(join.device)
        apply_share(self._device, join.share, join.memory_share, join.threads)
        self._device.activate()
        language_stream(self._device).__enter__()
        self._progress = LayerProgress(self._device.record_event)
        self._rank, self._size = join.rank, join.size
        self._remote = MappedKV()
        self._executor: StepExecutor | None = None
        self._group = ProcessGroup(self._device, join.rank, join.size, Path(join.rendezvous), join.timeout_s)
        self._model = LanguageModel(Path(join.model), getattr(torch, join.dtype), self._device, self._group)
        link.send(Joined(self._device.headroom()))

    def execute(self, command: Command) -> None:
        match command:
            case Join():
                raise ValueError("this rank has joined already")
            case CreateCache():
                self._create(command)
            case StepInputs():
                assert self._executor is not None, "the cache is created before a step"
                self._executor.compute(command, self._progress.passed)
            case CopyBlock():
                self._cache.copy_block(command.source, command.target)
            case Leave():
                self._executor = None
                gc.collect()  # graphs that have captured the group's collectives go before it
                self._group.close()
            case CopyCells() | MapKV() | UnmapKV() | WriteKV():
                raise ValueError("copies of KV have a thread of their own")
            case _:
                assert_never(command)
        self._progress.finished()

    def beside(self, command: Beside, number: int) -> None:
        """Carry a command out that came after ``number`` others: any of them may use the blocks of a copy."""
        error = ""
        match command:
            case CopyCells():
                layers = self._computed(command, number)
                self._cache.copy(layers, command.blocks, command.first_cell, lands=command.lands)
            case MapKV():
                error = self._remote.begin(command.region, self._cache)
            case UnmapKV():
                self._remote.end(command.name)
            case WriteKV():
                layers = self._computed(command, number) if command.blocks else range(0)
                error = self._remote.write(command, layers)
            case _:
                assert_never(command)
        self._link.send(Done(command.number, error))

    def _computed(self, command: CopyCells | WriteKV, number: int) -> range:
        """The layers of a copy, once the device has computed them."""
        self._progress.wait(number, command.end_layer - 1)
        return range(command.first_layer, command.end_layer)

    def _create(self, command: CreateCache) -> None:
        slab = map_region(command.slab)
        self._cache = KVCache(command.layout, command.num_blocks, self._device, slab, self._rank, self._size)
        self._link.send(Created(self._cache.handle))
        self._executor = StepExecutor.for_cache(self._model, self._device, self._cache.tensor, command)


def main(fd: int) -> None:
    """Serve the leader at the other end of ``fd``; does not return."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    link = follower_end(socket.socket(fileno=fd))
    join = link.receive()
    assert isinstance(join, Join), "the first command is to join"
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {join.name} %(levelname)s %(message)s")
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    copies: queue.SimpleQueue[tuple[Beside, int]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(link, commands, copies), daemon=True).start()
    follower = Follower(join, link)
    threading.Thread(target=_copy, args=(follower, copies), name="copies", daemon=True).start()
    while True:
        follower.execute(commands.get())


def _receive(
    link: Link[Command], commands: queue.SimpleQueue[Command], copies: queue.SimpleQueue[tuple[Beside, int]]
) -> None:
    """Receive on a thread of its own: the leader's end is noticed even while a collective waits for it."""
    num_commands = 0
    while True:
        try:
            command = link.receive()
        except LinkClosed:
            os._exit(0)
        if isinstance(command, Beside):
            copies.put((command, num_commands))
            continue
        num_commands += 1
        commands.put(command)


def _copy(follower: Follower, copies: queue.SimpleQueue[tuple[Beside, int]]) -> None:
    while True:
        try:
            follower.beside(*copies.get())
        except Exception:  # the leader waits for it: the instance is whole or gone
            logger.exception("a copy of KV failed")
            logging.shutdown()
            os._exit(1)


class MappedKV:
    """The KV of decode instances that this rank has mapped. The leader says when that begins and ends.

    The locks are this process's own: those of the leader go with the leader, before this rank does.
    """

    def __init__(self) -> None:
        self._locks = WriteLocks()
        self._writes: dict[str, tuple[Region, RemoteWrite, ExitStack]] = {}

    def begin(self, region: Region, cache: KVCache) -> str:
        """The reason for which it cannot be mapped; "": it is."""
        try:
            with ExitStack() as mapping:
                mapping.enter_context(self._locks.held(region, [MAPPED_SLOT]))
                write = mapping.enter_context(cache.mapped(region.handles))
                self._writes[region.name] = region, write, mapping.pop_all()
        except (ValueError, TransferError, RuntimeError) as error:  # its process may be gone, or the device refuse
            return f"{region.name} is not mapped on each rank: {error}"
        return ""

    def end(self, name: str) -> None:
        if (known := self._writes.pop(name, None)) is not None:
            known[2].close()

    def write(self, command: WriteKV, layers: range) -> str:
        """The reason for which nothing was written; "": it was."""
        region, write, _ = self._writes[command.name]
        try:
            with self._locks.held(region, command.slots):
                if time.monotonic() >= command.deadline:
                    return "the lease of a transfer ended before all ranks had written its KV"
                write(layers, command.blocks, command.remote)
        except TransferError as error:  # the decode instance has gone
            return str(error)
        return ""


class LayerProgress:
    """Commands are counted from 1, in the order in which they are executed; some are steps, layer by layer.

    Args:
        record_event: marks the device's work so far.
    """

    def __init__(self, record_event: Callable[[], Event]) -> None:
        self._record_event = record_event
        self._changed = threading.Condition()
        self._commands = 0
        self._layer = -1
        self._event: Event | None = None

    def passed(self, layer: int) -> None:
        """Note that the current step has given the device all work up to a layer's KV; the model's hook."""
        event = self._record_event()
        with self._changed:
            self._layer, self._event = layer, event
            self._changed.notify_all()

    def finished(self) -> None:
        """Note that the current command has given the device all of its work."""
        event = self._record_event()
        with self._changed:
            self._commands += 1
            self._layer, self._event = -1, event
            self._changed.notify_all()

    def wait(self, command: int, layer: int) -> None:
        """Block until the device has done ``command``, or, where that is a step, written the KV of ``layer``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._commands >= command or (self._commands == command - 1 and self._layer >= layer)
            )
            event = self._event
        if event is not None:
            event.synchronize()


if __name__ == "__main__":
    main(int(sys.argv[1]))
