"""The time budget of encodes on the device of decodes that have a TPOT limit.

Each decode step adds its limit to an account and subtracts the seconds it took. Encodes spend the credit, one
layer of the tower at a time, so the mean time per token stays at the limit. If decodes alone reach their limit,
encodes keep a small share of the time, so they never starve. The functions are pure: times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

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
