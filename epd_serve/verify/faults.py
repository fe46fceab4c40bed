"""The suite ``faults``: parts killed, stopped or cut off by commands, and what clients see of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress

from epd_serve.verify.check import CHECKS, Check, Skipped, Unjudged, check, require
from epd_serve.verify.client import LEASES_S, Client
from epd_serve.verify.items import asked, noise
from epd_serve.verify.traffic import Outcome, Request, Traffic, in_parallel

PARTS = ("E", "P", "D", "store", "router")
DEEDS = ("kill", "stop", "partition")
#: Seconds for the answer or the error of a request under a fault, and for the way back to answers.
ANSWER_S, RECOVERY_S = 60.0, 90.0
#: Seconds that a deed lasts before it is healed, and within which another one comes in a storm.
DEED_S = 2.5
#: Deeds of a storm.
_STORM_DEEDS = 12
#: Clients that ask meanwhile, and streams among them that have to be in their middle before a deed.
CONCURRENCY, LEAST_STREAMING, MID_STREAM_S = 12, 3, 10.0
#: Regular expressions for the command of a process with the part: of our native engine, or of vLLM.
_SEEN = {
    "E": '"role": "[EPD]*E|"ec_producer"|"ec_both"',
    "P": '"role": "[EPD]*P|"kv_producer"|"kv_both"|"ec_consumer"',
    "D": '"role": "[EPD]*D|"kv_consumer"|"kv_both"|"ec_consumer"[^ ]* --[^k]',
}


def admin_commands(options: Sequence[str]) -> dict[str, str]:
    """Read ``--admin``.

    ``kill-E=COMMAND`` names a command; after ``stop`` and ``partition``, ``heal-stop-E`` and ``heal-partition-E``
    undo them. ``up:PID`` stands for signals to the instances and the gateway of that ``epd-serve up``, and
    ``pids:E=12,P=13`` for signals to any processes of this machine.
    """
    commands: dict[str, str] = {}
    known = {f"{deed}-{part}" for deed in DEEDS for part in PARTS}
    known |= {f"heal-{name}" for name in known}
    for option in options:
        if option.startswith("up:"):
            pid = option.removeprefix("up:")
            if not pid.isdecimal():
                raise ValueError(f"--admin {option}: it should look like up:1234, the process of epd-serve up")
            for part in (*_SEEN, "router"):
                commands |= _signals(part, _process_of(part, pid))
        elif option.startswith("pids:"):
            for pair in option.removeprefix("pids:").split(","):
                part, _, pid = pair.partition("=")
                if part not in PARTS or not pid.isdecimal():
                    raise ValueError(f"--admin {option}: it should look like pids:E=12,P=13")
                commands |= _signals(part, pid)
        else:
            name, _, command = option.partition("=")
            if name not in known or not command:
                raise ValueError(f"--admin {option}: it should look like kill-E='COMMAND'")
            commands[name] = command
    return commands


def _signals(part: str, pid: str) -> dict[str, str]:
    names = {"KILL": f"kill-{part}", "STOP": f"stop-{part}", "CONT": f"heal-stop-{part}"}
    return {name: f"kill -{signal} {pid}" for signal, name in names.items()}


def _process_of(part: str, up: str) -> str:
    """Shell text for the process that has the part now: another one after each kill."""
    if part == "router":
        return f"$(pgrep -P {up} -f 'epd_serve.cli proxy')"
    forked = f"$(pgrep -P {up} -f multiprocessing.forkserver | sed 's/^/,/')"
    return f"$(pgrep -o -P {up}{forked} -f '{_SEEN[part]}')"


async def _command(line: str) -> None:
    process = await asyncio.create_subprocess_shell(
        line, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode:
        raise Skipped(f"{line!r} ended with {process.returncode}: {said.decode(errors='replace')[:200]}")


async def _requests(client: Client) -> list[Request]:
    """Texts and pictures, mostly streams, as long as the server makes them."""
    long = await client.endless()
    shared = {"max_tokens": 160, **long}
    contents = [*(asked(noise(number)) for number in range(5)), "What colours are there?", "Count to 99."]
    plain = [Request(key=f"plain {n}", content=one, fields=shared) for n, one in enumerate(contents[::2])]
    streams = [
        Request(key=f"stream {n}", content=one, fields={**shared, "stream": True})
        for n, one in enumerate(contents * 2)
    ]
    return [*streams, *plain]


async def _in_mid_stream(traffic: Traffic) -> int:
    """Wait until some streams are in their middle; return how many are."""
    end_s = time.monotonic() + MID_STREAM_S
    most = 0
    while most < LEAST_STREAMING and time.monotonic() < end_s:
        most = traffic.num_streaming
        await asyncio.sleep(0.002)
    return most


async def _under(client: Client, names: Sequence[str]) -> str:
    """Do the deeds of these names under traffic, one after the other."""
    traffic = Traffic(client, deadline_s=ANSWER_S, pause_s=0.3)
    requests = await _requests(client)
    await traffic.learn(requests, CONCURRENCY)
    traffic.may_cut = any(name.endswith("-router") for name in names)
    over, met = asyncio.Event(), []
    asking = asyncio.create_task(traffic.ask_until(requests, CONCURRENCY, over))
    try:
        for name in names:
            met.append(await _in_mid_stream(traffic))
            await _deed(client, name)
    finally:
        over.set()
        await asking
    counts = traffic.outcomes()
    wrong = traffic.wrong()
    require(not wrong, f"{len(wrong)} of {len(traffic.results)} answers: {wrong[:3]}")
    back_s = await _recovered(traffic, requests)
    said = f"{', '.join(map(str, met))} streams in their middle; {counts[Outcome.IDENTICAL]} answers right"
    longest_s = max(result.seconds for _, result in traffic.results)
    seen = (
        f"{said}, {counts[Outcome.ERROR]} clear errors, the last after {longest_s:.1f} s; back in {back_s:.1f} s"
    )
    try:
        await client.balanced(LEASES_S)
    except Unjudged as unjudged:
        raise Unjudged(f"{seen}; {unjudged}") from None
    return seen


async def _deed(client: Client, name: str) -> None:
    heal = client.admin.get(f"heal-{name}")
    try:
        await _command(client.admin[name])
        await asyncio.sleep(client.within(DEED_S))
    finally:
        if heal is not None:
            with suppress(Skipped):  # a supervisor may have replaced what was stopped
                await _command(heal)


async def _recovered(traffic: Traffic, requests: Sequence[Request]) -> float:
    """Seconds until each request is answered as before the fault. Raises Failed where one is not in time."""
    began_s = time.monotonic()

    async def one(request: Request) -> None:
        while (result := await traffic.ask(request)).outcome is not Outcome.IDENTICAL:
            require(result.outcome is Outcome.ERROR, f"after the fault: {result.detail}")
            limit_s = traffic.client.within(RECOVERY_S)
            late = f"no answer {limit_s:g} s after the fault: {result.detail} {result.text}"
            require(time.monotonic() < began_s + limit_s, late)
            await asyncio.sleep(traffic.pause_s)

    await in_parallel(one, requests, CONCURRENCY)
    return time.monotonic() - began_s


def _enter(deed: str, target: str) -> None:
    async def run(client: Client) -> str:
        name = f"{deed}-{target}"
        if name not in client.admin:
            raise Skipped(f"no --admin {name}=COMMAND")
        return await _under(client, [name])

    name = f"faults.{deed}-{target}"
    CHECKS[name] = Check(
        name=name,
        suite="faults",
        proves=f"With {target} under '{deed}' each answer is right or an error in time; then all is as before.",
        origin="dynamo 11460: no policy for an encoder's failure; D left hanging when P dies",
        limit_s=3 * ANSWER_S + RECOVERY_S,
        run=run,
    )


for _deed_name in DEEDS:
    for _part in PARTS:
        _enter(_deed_name, _part)


@check("faults", "a second fault before the first is over", limit_s=600)
async def storm(client: Client) -> str:
    """While parts of every kind are killed and stopped at random, each answer is right or an error in time."""
    known = sorted(name for name in client.admin if not name.startswith("heal-") and "router" not in name)
    if not known:
        raise Skipped("no --admin kill-E=COMMAND or the like")
    rng = random.Random(0)
    names = [rng.choice(known) for _ in range(_STORM_DEEDS)]
    return await _under(client, names)
