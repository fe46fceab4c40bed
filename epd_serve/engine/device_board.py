"""A device that several instances share: their parts of it, and the board on which they tell what they do."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from device.base import BareDevice
from epd_serve.config import InstanceOptions
from epd_serve.protocol.instance_state import AppliedShare
from epd_serve.sched.token_time import Slack

_SLOTS, _FIELDS, _DOUBLE = 64, 8, 8
_SIZE = _SLOTS * _FIELDS * _DOUBLE
# Of a slot. Decodes: when they last wrote, 0 for no decodes; their slack. Encodes: begin of the one that runs, 0
# for none; seconds of those before.
_BEAT, _CREDIT, _LIMIT, _ALONE, _BESIDE, _SINCE, _ENCODED = range(7)
#: Decodes that have not written for this long are over: their process may be gone.
_STALE_S = 1.0


class DeviceBoard:
    """Shared memory of the instances on one device: whether one encodes, and the slack that decodes leave for it.

    It has 64 slots of 8 doubles; each instance writes its own slot, and all of them read all.

    Several threads of an instance may write, each its own fields. A double is written at once; values that are
    read together need not have been written together, which at worst makes one pause too long or too short.

    Args:
        path: a file that the instances of the device share; None: this instance is alone there.
        clock: of the system, the same in all processes.
    """

    def __init__(self, path: Path | None, slot: int, clock: Callable[[], float]) -> None:
        """Raises ValueError for a slot that does not exist, OSError for a file that cannot be made."""
        if not 0 <= slot < _SLOTS:
            raise ValueError(f"slot {slot} of a device board: there are 0 to {_SLOTS - 1}")
        self._clock = clock
        self._map: mmap.mmap | None = None
        memory: bytearray | mmap.mmap = bytearray(_SIZE)
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, _SIZE)
                memory = self._map = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
        self._values = memoryview(memory).cast("d")
        self._own = slot * _FIELDS
        for field in range(_FIELDS):  # a process that was here before may have died in the middle of something
            self._values[self._own + field] = 0.0

    def close(self) -> None:
        self.decodes_end()
        self.encode_ends()
        self._values.release()
        if self._map is not None:
            self._map.close()

    # ------------------------------------------------------------------ told by decodes

    def decodes(self, slack: Slack) -> None:
        """Note that decodes are running, and that they leave this slack."""
        own, values = self._own, self._values
        values[own + _CREDIT], values[own + _LIMIT] = slack.credit_s, slack.limit_s
        values[own + _ALONE], values[own + _BESIDE] = slack.alone_s, slack.beside_s
        values[own + _BEAT] = self._clock()

    def decodes_end(self) -> None:
        self._values[self._own + _BEAT] = 0.0

    # ------------------------------------------------------------------ told by encodes

    def encode_begins(self) -> None:
        self._values[self._own + _SINCE] = self._clock()

    def encode_ends(self) -> None:
        own, values = self._own, self._values
        since = values[own + _SINCE]
        if since:
            values[own + _SINCE] = 0.0
            values[own + _ENCODED] += self._clock() - since

    # ------------------------------------------------------------------ asked by both

    def slack(self) -> Slack | None:
        """The least that any decodes on the device leave; None where there are none."""
        now, values = self._clock(), self._values
        slacks = [
            Slack(
                credit_s=values[slot + _CREDIT],
                limit_s=values[slot + _LIMIT],
                alone_s=values[slot + _ALONE],
                beside_s=values[slot + _BESIDE],
            )
            for slot in range(0, _SLOTS * _FIELDS, _FIELDS)
            if values[slot + _BEAT]
            and now - values[slot + _BEAT] < _STALE_S + 2 * max(values[slot + _BESIDE], values[slot + _ALONE])
        ]
        return min(slacks, key=lambda slack: slack.credit_s, default=None)

    def encoded_s(self) -> float:
        """Seconds for which encodes have run on the device, until now."""
        now, values = self._clock(), self._values
        total = 0.0
        for slot in range(0, _SLOTS * _FIELDS, _FIELDS):
            since = values[slot + _SINCE]
            total += values[slot + _ENCODED] + (max(now - since, 0.0) if since else 0.0)
        return total

    @property
    def encodes_here(self) -> bool:
        """Whether this instance itself encodes."""
        return self._values[self._own + _SINCE] > 0


def apply_share(options: InstanceOptions, device: BareDevice) -> AppliedShare | None:
    """Limit this process to its share and its part of the memory. Return the share; None where it has none.

    Raises ValueError for a share that the device cannot give.
    """
    applied: AppliedShare | None = None
    if (whole := options.device_share) is not None:
        partition = device.apply_share(whole.share, whole.start)
        applied = AppliedShare(whole.share, partition.strength, list(partition.mechanisms))
        if options.threads is not None:
            device.set_threads(options.threads)
    if options.memory_share is not None:
        device.set_memory_fraction(options.memory_share)
    return applied
