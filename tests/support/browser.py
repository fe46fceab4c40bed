"""Chromium without a window, told what to do over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One tab. ``problems`` are errors and warnings of its console and of its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session: dict[str, str] = {}
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []

    async def attach(self) -> None:
        """Open the tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def read(self) -> None:
        """Until the browser is gone."""
        async for message in self._socket:
            event = message.json()
            if event.get("id") in self._waiting:
                self._waiting.pop(event["id"]).set_result(event)
            method, details = event.get("method", ""), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                self.problems.append(str(details["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
                self.problems.append(str(details["args"]))
            elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                self.problems.append(details["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **self._session})
        answer = await asyncio.wait_for(waiting, 300)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def look(self, width: int, height: int, scheme: str) -> None:
        """Set the window's size in CSS pixels, and "dark" or "light"."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def run(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 300) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self.run(expression):
            assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_s} s: {expression}"
            await asyncio.sleep(0.05)

    async def screenshot(self) -> bytes:
        """A PNG of the whole page, however long."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def browser(program: str, profile: Path) -> AsyncIterator[Page]:
    """A tab of a browser of its own, whose files go to ``profile``."""
    process = await asyncio.create_subprocess_exec(
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-proxy-server",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "about:blank",
        env={**os.environ, "HOME": str(profile)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    tasks: list[asyncio.Task[Any]] = []
    try:
        address = ""
        async with asyncio.timeout(90):
            while not address:
                line = (await process.stderr.readline()).decode(errors="replace")
                assert line, "the browser has ended"
                if "DevTools listening on " in line:
                    address = line.split()[-1]
        tasks.append(asyncio.create_task(process.stderr.read()))
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=1 << 28) as socket:
            page = Page(socket)
            tasks.append(asyncio.create_task(page.read()))
            await page.attach()
            yield page
            await socket.send_json({"id": 0, "method": "Browser.close"})
            await asyncio.wait_for(process.wait(), 300)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
