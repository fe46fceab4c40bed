"""The account by which encodes run beside decodes that have a limit on their time per token.

The decodes keep an account: each step pays in the limit and takes out the seconds that it took. Encodes spend what
is there, one layer of the tower at a time, so that the mean time per token stays at the limit however much slower
a step is beside an encode; where decodes are at their limit without any encode, encodes keep a small share of the
time, so that they never starve. The functions are pure: clocks are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The account holds at most this many times the limit, either way: no request pays for what was long before it.
_DEPTH = 4
_SMOOTHING = 0.1
#: The part of a step beside which an encode ran that makes it a step beside an encode, or one alone.
_BESIDE, _ALONE = 0.5, 0.05
#: The least share of the time that encodes get while there are some.
MIN_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Slack:
    """The decodes' account of their time per token: what it leaves to encodes on their device.

    Attributes:
        credit_s: seconds that steps may still take beyond their limit.
        limit_s: limit on the time per token.
        alone_s, beside_s: mean seconds of steps without and beside an encode; 0 where there was none yet.
    """

    credit_s: float = 0.0
    limit_s: float
    alone_s: float = 0.0
    beside_s: float = 0.0

    def after(self, seconds: float, encoded_s: float) -> Slack:
        """Return the account after a token that took ``seconds``; an encode ran beside it for ``encoded_s``."""
        depth = _DEPTH * self.limit_s
        alone_s, beside_s = self.alone_s, self.beside_s
        if encoded_s >= _BESIDE * seconds:
            beside_s = beside_s + _SMOOTHING * (seconds - beside_s) if beside_s else seconds
        elif encoded_s <= _ALONE * seconds:
            alone_s = alone_s + _SMOOTHING * (seconds - alone_s) if alone_s else seconds
        credit_s = max(-depth, min(self.credit_s + self.limit_s - seconds, depth))
        return Slack(credit_s=credit_s, limit_s=self.limit_s, alone_s=alone_s, beside_s=beside_s)

    def cost_s(self, piece_s: float) -> float:
        """Seconds that an encode's piece of ``piece_s`` is expected to take from the account."""
        if not self.beside_s:
            return 0.0
        overshoot = max(self.beside_s - self.limit_s, 0.0)
        return min(overshoot * piece_s / self.beside_s, _DEPTH / 2 * self.limit_s)


def pause_s(slack: Slack | None, *, piece_s: float, paused_s: float) -> float:
    """Return the seconds that an encode waits before it asks again; 0: it goes on now.

    Its last piece took ``piece_s``, and it has waited ``paused_s`` since.
    """
    if slack is None or (slack.credit_s > 0 and slack.credit_s >= slack.cost_s(piece_s)):
        return 0.0
    patience_s = piece_s * (1 / MIN_SHARE - 1)
    return max(0.0, min(slack.limit_s / 2, patience_s - paused_s))
