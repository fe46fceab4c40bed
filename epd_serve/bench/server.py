"""The server under test: its model, and its topology where it is an epd-serve gateway."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
import msgspec

from device.datasheets import emulated_kind
from epd_serve.bench.answer import error_message

#: A gateway may hold its first answer back until its instances have loaded their model.
_MEET_TIMEOUT = aiohttp.ClientTimeout(total=60)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Instance(msgspec.Struct):
    device: str | None = None


class _Dashboard(msgspec.Struct):
    """The fields of our gateway's /dashboard/data that the load tester reads."""

    version: str
    topology: str | None = None
    instances: list[_Instance] = []


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server as it describes itself; other servers than our gateway tell their model alone."""

    model: str
    topology: str = ""
    version: str = ""
    emulated: str = ""  # the emulated devices of its instances, as "emulated h200"


async def meet(http: aiohttp.ClientSession, url: str, model: str) -> Server:
    """Ask the server for its models and its topology; ``model``: "" takes its only one.

    Raises ValueError where it does not answer, lacks the model, or has several models and none is named.
    """
    try:
        async with http.get(f"{url}/v1/models", timeout=_MEET_TIMEOUT) as answer:
            body = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ValueError(f"no answer from {url}/v1/models: {error}; is --base-url right?") from error
    if answer.status == 401:
        raise ValueError(f"{url} refuses the API key (HTTP 401: {error_message(body)}); export OPENAI_API_KEY=KEY")
    try:
        names = [one.id for one in msgspec.json.decode(body, type=_Models).data]
    except msgspec.MsgspecError:
        raise ValueError(
            f"{url}/v1/models: status {answer.status}: {error_message(body)}; is --base-url right?"
        ) from None
    if (model and model not in names) or (not model and len(names) != 1):
        raise ValueError(f"{url} has the models {', '.join(names) or '(none)'}; name one of them with --model")
    return await _describe(http, url, model or names[0])


async def _describe(http: aiohttp.ClientSession, url: str, model: str) -> Server:
    try:
        async with http.get(f"{url}/dashboard/data", timeout=_MEET_TIMEOUT) as answer:
            dashboard = msgspec.json.decode(await answer.read(), type=_Dashboard)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):  # another program
        return Server(model=model)
    devices = {one.device for one in dashboard.instances if one.device and one.device.startswith("emulated:")}
    kinds = ", ".join(sorted({emulated_kind(one) for one in devices}))
    return Server(
        model=model,
        topology=dashboard.topology or "",
        version=dashboard.version,
        emulated=f"emulated {kinds}" if kinds else "",
    )
