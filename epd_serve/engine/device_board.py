"""The board by which instances on one device publish their activity, and the time that decodes leave to encodes.

With a TPOT limit, each decode step adds its limit to an account and subtracts the seconds it took. Encodes spend
the credit, one layer of the tower at a time, so the mean time per token stays at the limit. If decodes alone reach
their limit, encodes keep a small share of the time, so they never starve.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SLOTS, _FIELDS = 64, 8
#: Fields of a slot. Decodes: last heartbeat, 0 for no decodes; from ``_SLACK`` on their slack. Encodes: start of
#: the running one, 0 for none; total seconds of the earlier ones.
_BEAT, _SLACK, _SINCE, _ENCODED = 0, 1, 5, 6
#: Heartbeat timeout of decodes, whose process may have died.
_STALE_S = 1.0

#: The account stays within this many limits, so that old steps do not burden new requests.
_DEPTH = 4
_SMOOTHING = 0.1
#: A step counts as shared from this part of it spent with an encode, and as alone up to this part.
_BESIDE, _ALONE = 0.5, 0.05
#: The least share of the time for pending encodes.
MIN_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Slack:
    """The decodes' account of their time per token.

    Attributes:
        credit_s: seconds that steps may exceed their limit by.
        limit_s: limit of the time per token.
        alone_s, beside_s: mean seconds of steps without and with an encode; 0 before the first.
    """

    credit_s: float = 0.0
    limit_s: float
    alone_s: float = 0.0
    beside_s: float = 0.0

    def after(self, seconds: float, encoded_s: float) -> Slack:
        """Return the account after a step of ``seconds``, ``encoded_s`` of them shared with an encode."""
        depth = _DEPTH * self.limit_s
        alone_s, beside_s = self.alone_s, self.beside_s
        if encoded_s >= _BESIDE * seconds:
            beside_s = beside_s + _SMOOTHING * (seconds - beside_s) if beside_s else seconds
        elif encoded_s <= _ALONE * seconds:
            alone_s = alone_s + _SMOOTHING * (seconds - alone_s) if alone_s else seconds
        credit_s = max(-depth, min(self.credit_s + self.limit_s - seconds, depth))
        return Slack(credit_s=credit_s, limit_s=self.limit_s, alone_s=alone_s, beside_s=beside_s)

    def cost_s(self, piece_s: float) -> float:
        """Return the credit that a piece of an encode, of ``piece_s``, is expected to use."""
        if not self.beside_s:
            return 0.0
        overshoot = max(self.beside_s - self.limit_s, 0.0)
        return min(overshoot * piece_s / self.beside_s, _DEPTH / 2 * self.limit_s)


def pause_s(slack: Slack | None, *, piece_s: float, paused_s: float) -> float:
    """Return the seconds after which an encode should ask again; 0 lets it continue now.

    Args:
        piece_s: duration of its last piece.
        paused_s: how long it has waited since.
    """
    if slack is None or (slack.credit_s > 0 and slack.credit_s >= slack.cost_s(piece_s)):
        return 0.0
    patience_s = piece_s * (1 / MIN_SHARE - 1)
    return max(0.0, min(slack.limit_s / 2, patience_s - paused_s))


class DeviceBoard:
    """Shared memory of the instances on one device: running encodes, and the slack that decodes leave them.

    It has 64 slots of 8 doubles; each instance writes its own slot and reads all. Threads of an instance write
    different fields. Writes of a double are atomic; reading fields of different age at worst makes one pause too
    long or too short.

    ``clock``: the system's clock, the same in all processes.
    """

    def __init__(self, path: Path | None, slot: int, clock: Callable[[], float]) -> None:
        """Raises OSError if the file cannot be created."""
        self._clock = clock
        self._memory = shared_board(path, _SLOTS * _FIELDS * 8)
        self._values = memoryview(self._memory).cast("d")
        self._slots = [self._values[at : at + _FIELDS] for at in range(0, len(self._values), _FIELDS)]
        self._own = self._slots[slot]
        for field in range(_FIELDS):  # clear the state of an earlier process that may have died
            self._own[field] = 0.0

    def close(self) -> None:
        self.decodes_end()
        self.encode_ends()
        for view in (*self._slots, self._values):
            view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()

    # ------------------------------------------------------------------ written by decodes

    def decodes(self, slack: Slack) -> None:
        """Publish that decodes are running and leave this slack."""
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
        """Return the smallest slack of any decodes on the device; None without decodes."""
        now, least = self._clock(), None
        for slot in self._slots:
            if beat := slot[_BEAT]:
                credit_s, limit_s, alone_s, beside_s = slot[_SLACK : _SLACK + 4]
                is_alive = now - beat < _STALE_S + 2 * max(beside_s, alone_s)
                if is_alive and (least is None or credit_s < least.credit_s):
                    least = Slack(credit_s=credit_s, limit_s=limit_s, alone_s=alone_s, beside_s=beside_s)
        return least

    def encoded_s(self) -> float:
        """Return the total seconds of encodes on the device until now."""
        now = self._clock()
        return sum(s[_ENCODED] + (max(now - s[_SINCE], 0.0) if s[_SINCE] else 0.0) for s in self._slots)

    @property
    def encodes_here(self) -> bool:
        """True while this instance encodes."""
        return self._own[_SINCE] > 0


def shared_board(path: Path | None, nbytes: int) -> bytearray | mmap.mmap:
    """Map a file shared by several instances, or return private memory without one. Raises OSError."""
    if path is None:
        return bytearray(nbytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
