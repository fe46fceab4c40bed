"""The limits of one API key: requests per second, tokens per minute, requests at once. Time is passed in."""

from __future__ import annotations

import math

from epd_serve.config.gateway import KeyLimits
from epd_serve.errors import Overloaded

#: Bytes of text that make about one token, for the estimate that is charged before anything is tokenised.
BYTES_PER_TOKEN = 4


class TokenBucket:
    """``rate`` per second flow in, ``burst`` fit in.

    What is taken may exceed what is there, as long as something is: a cost above ``burst`` is possible then, and
    paid back by a longer wait of the next. Over any time T no more than ``burst + rate·T`` plus one such debt goes
    out.
    """

    __slots__ = ("_burst", "_level", "_rate", "_updated_s")

    def __init__(self, rate: float, burst: float) -> None:
        assert rate > 0 and burst > 0
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._updated_s = -math.inf

    def wait_s(self, now_s: float, need: float = 1.0) -> float:
        """Seconds until ``need`` (the burst at most) is there; 0 where it is."""
        if now_s > self._updated_s:
            if self._updated_s > -math.inf:
                self._level = min(self._burst, self._level + (now_s - self._updated_s) * self._rate)
            self._updated_s = now_s
        missing = min(need, self._burst) - self._level
        return missing / self._rate if missing > 1e-9 else 0.0

    def take(self, cost: float) -> None:
        """Take ``cost`` out, as of the last :meth:`wait_s`."""
        self._level -= cost

    def give_back(self, cost: float) -> None:
        """Give back what was taken for nothing."""
        self._level = min(self._burst, self._level + cost)

    @property
    def state(self) -> tuple[float, float]:
        """(level, time of the last :meth:`wait_s`), to be kept elsewhere."""
        return self._level, self._updated_s

    @state.setter
    def state(self, state: tuple[float, float]) -> None:
        self._level, self._updated_s = state

    @property
    def level(self) -> float:
        """The level at the last :meth:`wait_s`; below 0 where a debt is paid back."""
        return self._level


class Client:
    """The holder of an API key, or all callers together where there are no keys.

    Attributes:
        num_active: requests that have entered and not left.
        num_refused: requests that a limit of the key has turned away.
    """

    __slots__ = ("_requests", "_tokens", "limits", "name", "num_active", "num_refused")

    def __init__(self, name: str, limits: KeyLimits | None = None) -> None:
        self.name = name
        self.limits = limits or KeyLimits()
        self.num_active = 0
        self.num_refused = 0
        rate, tokens = self.limits.requests_per_s, self.limits.tokens_per_min
        self._requests = TokenBucket(rate, self.limits.burst or max(1.0, rate)) if rate else None
        self._tokens = TokenBucket(tokens / 60, tokens) if tokens else None

    def enter(self, now_s: float) -> None:
        """Count a request in; :meth:`leave` counts it out. Raises Overloaded over a limit."""
        limits = self.limits
        if limits.max_concurrent is not None and (active := self.num_everywhere()) >= limits.max_concurrent:
            self.num_refused += 1
            raise Overloaded(
                f"this API key has {active} requests in progress, which is its limit",
                code="rate_limit_exceeded",
            )
        if self._requests is not None:
            wait_s = self._requests.wait_s(now_s)
            if wait_s > 0:
                self.num_refused += 1
                raise Overloaded(
                    f"this API key may send {limits.requests_per_s:g} requests per second; "
                    f"try again in {wait_s:.3g} s",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
            self._requests.take(1.0)
        self.num_active += 1

    def num_everywhere(self) -> int:
        """Requests that count against ``max_concurrent``."""
        return self.num_active

    def leave(self) -> None:
        assert self.num_active > 0
        self.num_active -= 1

    def charge(self, num_tokens: float, now_s: float) -> None:
        """Take a request's tokens off the key's minute. Raises Overloaded where they are not there yet."""
        if self._tokens is None:
            return
        wait_s = self._tokens.wait_s(now_s, num_tokens)
        if wait_s > 0:
            self.num_refused += 1
            raise Overloaded(
                f"this API key may use {self.limits.tokens_per_min:g} tokens per minute (prompt and max_tokens "
                f"together) and this request may take {num_tokens:.0f}; try again in {wait_s:.3g} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        self._tokens.take(num_tokens)

    def num_tokens_left(self, now_s: float) -> float:
        """The tokens left of the key's minute; infinite without a limit."""
        if self._tokens is None:
            return math.inf
        self._tokens.wait_s(now_s)
        return self._tokens.level

    def refund(self, num_tokens: float) -> None:
        """A request that was charged has not run."""
        if self._tokens is not None:
            self._tokens.give_back(num_tokens)


def estimate_tokens(text_bytes: int, max_tokens: int | None, num_choices: int = 1) -> int:
    """Return the charge for a request: its prompt, by bytes of text, and the longest answer that it asks for.

    An open ``max_tokens`` counts as 16, as it is in completions: how long such an answer gets nobody knows yet.
    """
    return text_bytes // BYTES_PER_TOKEN + (16 if max_tokens is None else max_tokens) * num_choices
