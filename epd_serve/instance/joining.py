"""An instance that was started by itself joins gateways: it takes a lease at each and renews it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

import aiohttp

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class Joining:
    """At one gateway's admin plane.

    Args:
        name, url: of the instance.
        headers: that the admin plane asks for.
        lease_s: after so long without a renewal the gateway takes it out; it is renewed three times as often.
    """

    def __init__(
        self, admin_url: str, name: str, url: str, headers: Mapping[str, str], *, lease_s: float = 10.0
    ) -> None:
        self._url = admin_url.rstrip("/") + "/instances"
        self._body = {"name": name, "url": url, "lease_s": lease_s}
        self._name = name
        self._headers = dict(headers)
        self._lease_s = lease_s
        self._has_lease = False

    async def run(self) -> None:
        """Join and stay; leave when cancelled. A gateway that is not there is asked again and again."""
        problem = ""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=False) as session:
            try:
                while True:
                    before, problem = problem, await self._renew(session)
                    if problem != before:
                        logger.warning("%s", problem) if problem else logger.info("joined %s", self._url)
                    await asyncio.sleep(self._lease_s / 3)
            finally:
                if self._has_lease:  # where the name was refused, it is another's
                    with suppress(aiohttp.ClientError, TimeoutError, OSError):
                        async with session.delete(f"{self._url}/{self._name}"):
                            logger.info("left %s", self._url)

    async def _renew(self, session: aiohttp.ClientSession) -> str:
        """What is wrong; "" for nothing."""
        try:
            async with session.post(self._url, json=self._body) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{self._url} does not answer: {error or type(error).__name__}"
        self._has_lease = answer.status < 300
        return "" if self._has_lease else f"{self._url} answered {answer.status}: {text[:300]}"
