"""The launcher's socket, and those of another version at its ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import pytest

from epd_serve import __version__
from epd_serve.launch.control import ApplyRequest, ControlServer, ask_launcher
from epd_serve.launch.rollout import Rollout
from epd_serve.rpc.link import pack


async def test_a_launcher_of_another_version_is_told_as_one(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.write(pack(["what", "a later version says"]))
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "control"):
        with pytest.raises(ValueError, match=f"another version of epd-serve than {__version__}: what came is no"):
            await ask_launcher(tmp_path / "control", ApplyRequest(), print)


async def test_an_order_of_another_version_gets_an_answer(tmp_path: Path) -> None:
    server = ControlServer(cast(Rollout, None))
    await server.start(tmp_path / "control")
    try:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "control")
        writer.write(pack(["what", "a later version asks"]))
        answer = msgspec.msgpack.decode((await asyncio.wait_for(reader.read(), 60))[4:])
        assert f"was started by epd-serve {__version__}, which does not understand" in answer["error"]
        writer.close()
    finally:
        await server.close()


async def test_who_ends_without_an_answer_has_ended(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "control"):
        with pytest.raises(ValueError, match="the deployment has ended"):
            await ask_launcher(tmp_path / "control", ApplyRequest(), print)
