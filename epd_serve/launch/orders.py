"""Orders to the gateway of a deployment, over the socket that it has for its launcher (``proxy/orders.py``)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

_AGAIN_S = 0.1
#: An order's own deadline is this part of the time that is left, and at most so many seconds, before its end: its
#: answer comes while somebody waits for it.
_MARGIN, _MAX_MARGIN_S = 0.1, 2.0
#: Somebody is starting again, or is on the way to something else.
_PASSING = frozenset({409, 429, 502, 503})


class OrderRefused(Exception):
    """The gateway, or the instance, says that it cannot be, or said so until the deadline."""


class GatewayOrders:
    """Each order is given again, until its deadline, where what is in its way passes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def give(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> Any:
        """The answer. A ``deadline_s`` in the body is cut to what is left of the one here.

        Raises OrderRefused with the reason.
        """
        loop = asyncio.get_running_loop()
        deadline, reason = loop.time() + deadline_s, "the gateway does not answer"
        while (left_s := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    status, content = await self._ask(method, path, _within(body, left_s))
            except TimeoutError:  # an OSError, too
                break
            except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:  # it is starting again
                reason = f"the gateway does not answer ({error})"
            else:
                if status < 400:
                    return content
                reason = str(content.get("error", {}).get("message") or content)
                if status not in _PASSING:
                    raise OrderRefused(reason)
            await asyncio.sleep(_AGAIN_S)
        raise OrderRefused(f"{reason}; {deadline_s:g} s are over")

    async def is_ready(self, name: str, deadline_s: float) -> None:
        """Return when the gateway gives an instance work. Raises OrderRefused."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        while (left_s := deadline - loop.time()) > 0:
            with suppress(OrderRefused):
                if name in (await self.give("GET", "/ready", None, left_s))["ready"]:
                    return
            await asyncio.sleep(_AGAIN_S)
        raise OrderRefused(f"the gateway has not found {name} ready in {deadline_s:g} s")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        connector = aiohttp.UnixConnector(path=str(self._path))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.request(method, f"http://gateway{path}", json=body) as answer,
        ):
            return answer.status, msgspec.json.decode(await answer.read())


def _within(body: dict[str, Any] | None, left_s: float) -> dict[str, Any] | None:
    if body is None or "deadline_s" not in body:
        return body
    return body | {"deadline_s": min(body["deadline_s"], left_s - min(_MAX_MARGIN_S, _MARGIN * left_s))}
