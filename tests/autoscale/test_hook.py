"""A hook is a real program or a real server; what goes wrong with it is said and harms nobody."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from aiohttp import web

from epd_serve.autoscale.hook import tell
from epd_serve.config.elastic import HookConfig

WISH = {"event": "more", "role": "D", "reason": "decode is at 3.0 times what the SLO allows"}


async def test_a_command_reads_the_wish_from_its_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "told.json"
    program = f"import pathlib, sys; pathlib.Path({str(file)!r}).write_text(sys.stdin.read())"
    assert await tell(HookConfig(command=(sys.executable, "-c", program)), WISH)
    assert json.loads(file.read_text()) == WISH


@pytest.mark.parametrize(
    ("command", "timeout_s", "said"),
    [
        (
            (sys.executable, "-c", "import sys; sys.exit('no machine')"),
            30.0,
            "exit status 1: no machine",
        ),
        (("/no/such/program",), 30.0, "No such file"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), 0.2, "longer than 0.2 s"),
    ],
)
async def test_a_command_that_fails_is_logged(
    command: tuple[str, ...], timeout_s: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not await tell(HookConfig(command=command, timeout_s=timeout_s), WISH)
    assert said in caplog.text


async def test_a_url_gets_the_wish_by_post(caplog: pytest.LogCaptureFixture) -> None:
    told: list[object] = []

    async def scale(request: web.Request) -> web.Response:
        told.append(await request.json())
        return web.Response(status=202 if len(told) == 1 else 500)

    app = web.Application()
    app.router.add_post("/scale", scale)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        hook = HookConfig(url=f"http://127.0.0.1:{port}/scale")
        assert await tell(hook, WISH)
        assert not await tell(hook, WISH)
    finally:
        await runner.cleanup()
    assert told == [WISH, WISH]
    assert "status 500" in caplog.text
    assert not await tell(hook, WISH)  # nobody is there any more
