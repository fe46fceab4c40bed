"""API keys: bearer tokens against their hashes, and the limits of each. Time is passed in."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable
from hashlib import blake2b, sha256
from typing import ClassVar

from epd_serve.config.gateway import KeyLimits
from epd_serve.config.keys import HASH_PREFIX
from epd_serve.errors import InvalidRequest, Overloaded, ServeError

#: Bytes of text that make about one token, for the estimate that is charged before anything is tokenised.
BYTES_PER_TOKEN = 4
#: Everybody's name where there are no keys.
ANONYMOUS = "anonymous"


class TokenBucket:
    """``rate`` per second flow in, ``burst`` fit in.

    What is taken may exceed what is there, as long as something is: a cost above ``burst`` is possible then, and
    paid back by a longer wait of the next. Over any time T no more than ``burst + rate·T`` plus one such debt goes
    out.

    Attributes:
        level: what was there at the last :meth:`wait_s`; below 0 where a debt is paid back.
        updated_s: the time of that.
    """

    __slots__ = ("_burst", "_rate", "level", "updated_s")

    def __init__(self, rate: float, burst: float) -> None:
        assert rate > 0 and burst > 0
        self._rate = rate
        self._burst = burst
        self.level = burst
        self.updated_s = -math.inf

    def wait_s(self, now_s: float, need: float = 1.0) -> float:
        """Seconds until ``need`` (the burst at most) is there; 0 where it is."""
        if now_s > self.updated_s:
            if self.updated_s > -math.inf:
                self.level = min(self._burst, self.level + (now_s - self.updated_s) * self._rate)
            self.updated_s = now_s
        missing = min(need, self._burst) - self.level
        return missing / self._rate if missing > 1e-9 else 0.0

    def take(self, cost: float) -> None:
        """Take ``cost`` out, as of the last :meth:`wait_s`."""
        self.level -= cost

    def give_back(self, cost: float) -> None:
        """Give back what was taken for nothing."""
        self.level = min(self._burst, self.level + cost)


class Client:
    """The holder of an API key, or all callers together where there are no keys.

    Attributes:
        id: stands for the key where instances let keys take turns, the same at all gateways; "" without keys.
        num_active: choices of requests that have entered and not left.
        num_refused: requests that a limit of the key has turned away.
        requests, tokens: what flows in for it; None: it has no such limit.
    """

    __slots__ = ("id", "limits", "name", "num_active", "num_refused", "requests", "tokens")

    def __init__(self, name: str, limits: KeyLimits | None = None) -> None:
        self.name = name
        self.limits = limits or KeyLimits()
        self.num_active = 0
        self.num_refused = 0
        self.id = "" if name == ANONYMOUS else blake2b(name.encode(), digest_size=8).hexdigest()
        rate, per_min = self.limits.requests_per_s, self.limits.tokens_per_min
        self.requests = TokenBucket(rate, self.limits.burst or max(1.0, rate)) if rate else None
        self.tokens = TokenBucket(per_min / 60, per_min) if per_min else None

    def enter(self, now_s: float) -> None:
        """Count a request in; :meth:`leave` counts it out. Raises Overloaded over a limit."""
        limits = self.limits
        if limits.max_concurrent is not None and (active := self.num_active) >= limits.max_concurrent:
            self.num_refused += 1
            raise Overloaded(
                f"this API key has {active} requests in progress (each choice counts as one), which is its limit",
                code="rate_limit_exceeded",
            )
        if self.requests is not None:
            wait_s = self.requests.wait_s(now_s)
            if wait_s > 0:
                self.num_refused += 1
                raise Overloaded(
                    f"this API key may send {limits.requests_per_s:g} requests per second; "
                    f"try again in {wait_s:.3g} s",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
            self.requests.take(1.0)
        self.num_active += 1

    def widen(self, num_choices: int) -> None:
        """Count a request that has entered as so many. Raises Overloaded over the key's limit, and InvalidRequest
        where it would be over it alone."""
        most = self.limits.max_concurrent
        if most is not None and num_choices > most:
            raise InvalidRequest(
                f"this API key may have {most} choices in progress at once, and this request is for {num_choices}",
                param="n",
            )
        if most is not None and (others := self.num_active - 1) + num_choices > most:
            self.num_refused += 1
            raise Overloaded(
                f"this API key has {others} requests in progress (each choice counts as one); "
                f"it may have {most}, the {num_choices} of this one included",
                code="rate_limit_exceeded",
            )
        self.num_active += num_choices - 1

    def leave(self, num_choices: int = 1) -> None:
        assert self.num_active >= num_choices
        self.num_active -= num_choices

    def charge(self, num_tokens: float, now_s: float) -> None:
        """Take a request's tokens off the key's minute, which has a limit. Raises Overloaded where they are not
        there yet."""
        assert self.tokens is not None
        wait_s = self.tokens.wait_s(now_s, num_tokens)
        if wait_s > 0:
            self.num_refused += 1
            raise Overloaded(
                f"this API key may use {self.limits.tokens_per_min:g} tokens per minute (prompt and max_tokens "
                f"together) and this request may take {num_tokens:.0f}; try again in {wait_s:.3g} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        self.tokens.take(num_tokens)

    def num_tokens_left(self, now_s: float) -> float:
        """The tokens left of the key's minute; infinite without a limit."""
        if self.tokens is None:
            return math.inf
        self.tokens.wait_s(now_s)
        return self.tokens.level

    def refund(self, num_tokens: float) -> None:
        """A request that was charged has not run."""
        assert self.tokens is not None
        self.tokens.give_back(num_tokens)


#: Longer ones are refused unhashed.
MAX_TOKEN_BYTES = 4096
_NOBODY = bytes(32)


class Unauthorized(ServeError):
    status: ClassVar[int] = 401
    type: ClassVar[str] = "authentication_error"
    default_code: ClassVar[str | None] = "invalid_api_key"


class Authenticator:
    """Finds the client that a bearer token belongs to.

    Attributes:
        anonymous: everybody, where there are no keys.
    """

    def __init__(self, keys: Iterable[tuple[str, Client]]) -> None:
        """``keys`` are (hash as of :func:`epd_serve.config.keys.hash_key`, its holder)."""
        self._holders: dict[bytes, Client] = {}
        self.anonymous: Client | None = None
        self.replace(keys)

    def replace(self, keys: Iterable[tuple[str, Client]]) -> None:
        """From now on these are the keys. Whose name and limits stay is counted on; requests in progress go on."""
        before, self._holders = self._holders, {}
        for text, client in keys:
            digest = bytes.fromhex(text.removeprefix(HASH_PREFIX))
            known = before.get(digest)
            same = known is not None and (known.name, known.limits) == (client.name, client.limits)
            self._holders[digest] = known if known is not None and same else client
        self.anonymous = None if self._holders else self.anonymous or Client(ANONYMOUS)

    @property
    def clients(self) -> list[Client]:
        return list(self._holders.values()) if self.anonymous is None else [self.anonymous]

    def check(self, authorization: str | bytes | None) -> Client:
        """The client behind the value of the ``Authorization`` header. Raises Unauthorized.

        How long it takes says nothing about the keys: they are looked up by a digest that the caller cannot steer,
        in a table whose own hash is random in each process, and compared in constant time.
        """
        if self.anonymous is not None:
            return self.anonymous
        # Headers as text are handed over as Latin-1, whatever the client's bytes meant.
        header = authorization.encode("latin-1") if isinstance(authorization, str) else authorization or b""
        scheme, _, token = header.partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer" or not token:
            raise Unauthorized("an API key is required: send the header 'Authorization: Bearer <key>'")
        if len(token) <= MAX_TOKEN_BYTES:
            digest = sha256(token).digest()
            holder = self._holders.get(digest)
            if hmac.compare_digest(digest if holder is not None else _NOBODY, digest) and holder is not None:
                return holder
        raise Unauthorized("the API key is none that this gateway knows")
