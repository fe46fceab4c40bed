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

_SLOTS, _FIELDS = 64, 8
#: Fields of a slot. Decodes: when they last wrote, 0 for no decodes; from ``_SLACK`` on their slack. Encodes:
#: begin of the one that runs, 0 for none; seconds of those before.
_BEAT, _SLACK, _SINCE, _ENCODED = 0, 1, 5, 6
#: Decodes that have not written for this long are over: their process may be gone.
_STALE_S = 1.0


class DeviceBoard:
    """Shared memory of the instances on one device: whether one encodes, and the slack that decodes leave for it.

    It has 64 slots of 8 doubles; each instance writes its own slot, and all of them read all. Several threads of
    an instance may write, each its own fields. A double is written at once; values that are read together need
    not have been written together, which at worst makes one pause too long or too short.

    Args:
        path: a file that the instances of the device share; None: this instance is alone there.
        clock: of the system, the same in all processes.
    """

    def __init__(self, path: Path | None, slot: int, clock: Callable[[], float]) -> None:
        """Raises OSError for a file that cannot be made."""
        self._clock = clock
        self._map: mmap.mmap | None = None
        memory: bytearray | mmap.mmap = bytearray(_SLOTS * _FIELDS * 8)
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, len(memory))
                memory = self._map = mmap.mmap(descriptor, len(memory))
            finally:
                os.close(descriptor)
        self._values = memoryview(memory).cast("d")
        self._slots = [self._values[at : at + _FIELDS] for at in range(0, len(self._values), _FIELDS)]
        self._own = self._slots[slot]
        for field in range(_FIELDS):  # a process that was here before may have died in the middle of something
            self._own[field] = 0.0

    def close(self) -> None:
        self.decodes_end()
        self.encode_ends()
        for view in (*self._slots, self._values):
            view.release()
        if self._map is not None:
            self._map.close()

    # ------------------------------------------------------------------ written by decodes

    def decodes(self, slack: Slack) -> None:
        """Note that decodes are running, and that they leave this slack."""
        for field, value in enumerate((slack.credit_s, slack.limit_s, slack.alone_s, slack.beside_s), _SLACK):
            self._own[field] = value
        self._own[_BEAT] = self._clock()

    def decodes_end(self) -> None:
        self._own[_BEAT] = 0.0

    # ------------------------------------------------------------------ written by encodes

    def encode_begins(self) -> None:
        self._own[_SINCE] = self._clock()

    def encode_ends(self) -> None:
        since, self._own[_SINCE] = self._own[_SINCE], 0.0
        if since:
            self._own[_ENCODED] += self._clock() - since

    # ------------------------------------------------------------------ read by both

    def slack(self) -> Slack | None:
        """The least that any decodes on the device leave; None where there are none."""
        now, least = self._clock(), None
        for slot in self._slots:
            if beat := slot[_BEAT]:
                credit_s, limit_s, alone_s, beside_s = slot[_SLACK : _SLACK + 4]
                is_alive = now - beat < _STALE_S + 2 * max(beside_s, alone_s)
                if is_alive and (least is None or credit_s < least.credit_s):
                    least = Slack(credit_s=credit_s, limit_s=limit_s, alone_s=alone_s, beside_s=beside_s)
        return least

    def encoded_s(self) -> float:
        """Seconds for which encodes have run on the device, until now."""
        now = self._clock()
        return sum(s[_ENCODED] + (max(now - s[_SINCE], 0.0) if s[_SINCE] else 0.0) for s in self._slots)

    @property
    def encodes_here(self) -> bool:
        """Whether this instance itself encodes."""
        return self._own[_SINCE] > 0


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
