"""The leader's side of a tensor-parallel instance: starts the processes of the other ranks and leads them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import torch

from device.base import Device
from device.distributed import ProcessGroup
from epd_serve.config import InstanceOptions
from epd_serve.engine.commands import (
    Answer,
    Beside,
    Command,
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
    leader_end,
    packed,
)
from epd_serve.engine.device_board import rank_share
from epd_serve.engine.step_inputs import StepInputs
from epd_serve.protocol.wire import Region
from epd_serve.rpc.link import Link, LinkClosed
from epd_serve.transfer.transport import TransferError

logger = logging.getLogger(__name__)

#: A rank that does not come to a collective for this long is taken for dead.
COLLECTIVE_TIMEOUT_S = 60.0
#: Nor does one live that has not copied some blocks by then; it may have to end a step first.
COPY_TIMEOUT_S = 180.0
_EXIT_GRACE_S = 3.0

_A = TypeVar("_A", Joined, Created, Done)


class Followers:
    """Ranks 1 ... size - 1 of an instance whose rank 0 is this process.

    They end with this process, and this process with any of them: the instance is whole or gone.
    """

    def __init__(self, options: InstanceOptions, dtype: torch.dtype) -> None:
        """Start them; they load while this process does."""
        self._directory = tempfile.TemporaryDirectory(prefix="epd-serve-")
        self._rendezvous = Path(self._directory.name) / "rendezvous"
        self.size = len(options.devices)
        self._links: list[Link[Answer]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.SimpleQueue[Answer]] = []
        self._group: ProcessGroup | None = None
        self._copying = threading.Lock()
        self._num_copies = 0
        self._closing = False
        for rank, device in enumerate(options.devices[1:], start=1):
            self._start(
                Join(
                    name=f"{options.name}.{rank}",
                    model=str(options.model),
                    dtype=str(dtype).removeprefix("torch."),
                    device=device,
                    threads=options.threads,
                    share=rank_share(options, rank),
                    memory_share=options.memory_share,
                    rank=rank,
                    size=self.size,
                    rendezvous=str(self._rendezvous),
                    timeout_s=COLLECTIVE_TIMEOUT_S,
                )
            )

    def join(self, device: Device) -> ProcessGroup:
        """Meet them as rank 0."""
        self._group = ProcessGroup(device, 0, self.size, self._rendezvous, COLLECTIVE_TIMEOUT_S)
        return self._group

    def wait_joined(self) -> int:
        """Wait until all have loaded their share; the least free memory of a device among them, in bytes."""
        return min(self._answer(answers, Joined).free_bytes for answers in self._answers)

    def create_cache(self, command: CreateCache) -> list[bytes]:
        """Have all of them allocate their KV; the handles by which others map it, in the order of ranks."""
        self.send(command)
        return [self._answer(answers, Created).handle for answers in self._answers]

    def send(self, command: Command) -> None:
        """Give all of them a command; returns before they carry it out."""
        data = packed(command)
        for link in self._links:
            try:
                link.send_packed(data)
            except LinkClosed as error:
                self._end(f"a follower is gone: {error}")

    @contextlib.contextmanager
    def together(self, inputs: StepInputs) -> Iterator[None]:
        """A context for this rank's share of a step. Its features go to the others from device to device.

        A failure in it ends all ranks, which would wait for each other.
        """
        if inputs.features is not None:
            inputs = msgspec.structs.replace(inputs, features=torch.empty_like(inputs.features, device="meta"))
        self.send(inputs)
        try:
            yield
        except Exception:
            logger.exception("a step failed on rank 0")
            self._end("its ranks are out of step")

    @contextlib.contextmanager
    def copying(self, layers: range, blocks: Sequence[int], first_cell: int, *, lands: bool) -> Iterator[None]:
        """A context for this rank's share of a copy between cache and slab; all ranks are done at its end."""
        with self._beside(
            lambda number: CopyCells(number, layers.start, layers.stop, list(blocks), first_cell, lands)
        ):
            yield

    @contextlib.contextmanager
    def mapping(self, region: Region) -> Iterator[None]:
        """A context in which they can :meth:`write <writing>` to the KV on the devices behind a region.

        Raises ValueError where one of them does not reach it.
        """
        try:
            try:
                with self._beside(lambda number: MapKV(number, region)):
                    pass
            except TransferError as error:
                raise ValueError(str(error)) from error
            yield
        finally:
            with self._beside(lambda number: UnmapKV(number, region.name)):
                pass

    @contextlib.contextmanager
    def writing(
        self,
        region: Region,
        layers: range,
        blocks: Sequence[int],
        remote: Sequence[int],
        slots: Sequence[int],
        deadline: float,
    ) -> Iterator[None]:
        """A context for this rank's share of a write to a region; all ranks are done at its end.

        Raises TransferError where one of them did not begin in time.
        """
        name, places = region.name, (list(blocks), list(remote), list(slots))
        with self._beside(lambda number: WriteKV(number, name, layers.start, layers.stop, *places, deadline)):
            yield

    @contextlib.contextmanager
    def _beside(self, command: Callable[[int], Beside]) -> Iterator[None]:
        """A context for this rank's share of a command. Raises TransferError where it failed on another one."""
        with self._copying:
            self._num_copies += 1
            self.send(command(self._num_copies))
            errors: list[str] = []
            try:
                yield
            finally:  # also after a failure here: the blocks may be another's as soon as this returns
                errors = [error for answers in self._answers if (error := self._wait_copied(answers))]
            if errors:
                raise TransferError(errors[0])

    def _wait_copied(self, answers: queue.SimpleQueue[Answer]) -> str:
        try:
            while (answer := self._answer(answers, Done, COPY_TIMEOUT_S)).number != self._num_copies:
                pass
        except queue.Empty:
            self._end(f"a follower has not copied KV within {COPY_TIMEOUT_S:g} s")
        return answer.error

    def close(self) -> None:
        """Leave the group with them, and end them. This process may be in another group then."""
        if self._group is not None:
            gc.collect()  # graphs that have captured its collectives go before it
            self.send(Leave())
            self._group.close()
        self._closing = True
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()

    def _start(self, join: Join) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "epd_serve.engine.follower", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        link, answers = leader_end(ours), queue.SimpleQueue[Answer]()
        link.send(join)
        self._links.append(link)
        self._processes.append(process)
        self._answers.append(answers)
        threading.Thread(
            target=self._listen, args=(link, answers, join.name), name=f"listen-{join.rank}", daemon=True
        ).start()

    def _listen(self, link: Link[Answer], answers: queue.SimpleQueue[Answer], name: str) -> None:
        while True:
            try:
                answers.put(link.receive())
            except LinkClosed:
                if not self._closing:
                    self._end(f"follower {name} has ended")
                return

    @staticmethod
    def _answer(answers: queue.SimpleQueue[Answer], kind: type[_A], timeout_s: float | None = None) -> _A:
        answer = answers.get(timeout=timeout_s)
        assert isinstance(answer, kind), f"{answer} where {kind.__name__} was due"
        return answer

    def _end(self, reason: str) -> NoReturn:
        """End this process at once: a rank is missing, and threads wait in collectives that never come."""
        logger.error("the instance ends: %s", reason)
        logging.shutdown()
        os._exit(1)
