"""The suite ``faults``: kill, stop or partition parts of a deployment under traffic."""

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
FAULTS = ("kill", "stop", "partition")
#: Seconds for the answer or error of a request during a fault, and for recovery afterwards.
ANSWER_S, RECOVERY_S = 60.0, 90.0
#: Duration of a fault.
FAULT_S = 2.5
_STORM_FAULTS = 12
#: Concurrent clients; streams that must be open before a fault, and the wait for them.
CONCURRENCY, MIN_STREAMING, MID_STREAM_S = 12, 3, 10.0
#: Regular expressions for the command line of a part's process, if it was not forked.
_COMMAND_LINES = {
    "E": '"role": ?"[EPD]*E|"ec_producer"|"ec_both"',
    "P": '"role": ?"[EPD]*P|"kv_producer"|"kv_both"|"ec_consumer"',
    "D": '"role": ?"[EPD]*D|"kv_consumer"|"kv_both"|"ec_consumer"[^ ]* --[^k]',
}


def admin_commands(options: Sequence[str]) -> dict[str, str]:
    """Parse ``--admin`` into shell commands by name. Raises ValueError.

    ``kill-E=COMMAND`` sets a command; ``heal-stop-E`` and ``heal-partition-E`` undo ``stop-E`` and
    ``partition-E``. ``up:PID`` signals the instances and the gateway of that ``epd-serve up``,
    ``pids:E=12,P=13`` any processes of this machine.
    """
    commands: dict[str, str] = {}
    known = {f"{fault}-{part}" for fault in FAULTS for part in PARTS}
    known |= {f"heal-{name}" for name in known}
    for option in options:
        if option.startswith("up:"):
            pid = option.removeprefix("up:")
            if not pid.isdecimal():
                raise ValueError(f"--admin {option}: it should look like up:1234, the process of epd-serve up")
            for part in (*_COMMAND_LINES, "router"):
                commands |= _signal_commands(part, _find_process(part, pid))
        elif option.startswith("pids:"):
            for pair in option.removeprefix("pids:").split(","):
                part, _, pid = pair.partition("=")
                if part not in PARTS or not pid.isdecimal():
                    raise ValueError(f"--admin {option}: it should look like pids:E=12,P=13")
                commands |= _signal_commands(part, pid)
        else:
            name, _, command = option.partition("=")
            if name not in known or not command:
                raise ValueError(f"--admin {option}: it should look like kill-E='COMMAND'")
            commands[name] = command
    return commands


def _signal_commands(part: str, pid: str) -> dict[str, str]:
    names = {"KILL": f"kill-{part}", "STOP": f"stop-{part}", "CONT": f"heal-stop-{part}"}
    return {name: f"kill -{signal} {pid}" for signal, name in names.items()}


def _find_process(part: str, up: str) -> str:
    """Return shell text that finds the part's current process, which changes after each kill."""
    if part == "router":
        return f"$(pgrep -P {up} -f 'epd_serve.cli proxy')"
    forked = f"$(pgrep -P {up} -f multiprocessing.forkserver | sed 's/^/,/')"
    name = f"^epd-serve [epd]*{part.lower()}[epd]*[0-9]"  # of a forked process, after its instance
    return f"$(pgrep -o -P {up}{forked} '{name}' || pgrep -o -P {up} -f '{_COMMAND_LINES[part]}')"


async def _run_command(line: str) -> None:
    process = await asyncio.create_subprocess_shell(
        line, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode:
        raise Skipped(f"{line!r} ended with {process.returncode}: {said.decode(errors='replace')[:200]}")


async def _requests(client: Client) -> list[Request]:
    """Return requests with and without pictures, mostly streams with long answers."""
    long = await client.endless()
    shared = {"max_tokens": 160, **long}
    contents = [*(asked(noise(number)) for number in range(5)), "What colours are there?", "Count to 99."]
    plain = [Request(key=f"plain {n}", content=one, fields=shared) for n, one in enumerate(contents[::2])]
    streams = [
        Request(key=f"stream {n}", content=one, fields={**shared, "stream": True})
        for n, one in enumerate(contents * 2)
    ]
    return [*streams, *plain]


async def _wait_streaming(traffic: Traffic) -> int:
    """Wait until MIN_STREAMING streams are open; return how many are."""
    end_s = time.monotonic() + MID_STREAM_S
    most = 0
    while most < MIN_STREAMING and time.monotonic() < end_s:
        most = traffic.num_streaming
        await asyncio.sleep(0.002)
    return most


async def _inject_faults(client: Client, names: Sequence[str]) -> str:
    """Inject faults one after the other under traffic; return the observations."""
    traffic = Traffic(client, deadline_s=ANSWER_S, pause_s=0.3)
    requests = await _requests(client)
    await traffic.learn(requests, CONCURRENCY)
    traffic.may_cut = any(name.endswith("-router") for name in names)
    over, num_streaming = asyncio.Event(), []
    asking = asyncio.create_task(traffic.ask_until(requests, CONCURRENCY, over))
    try:
        for name in names:
            num_streaming.append(await _wait_streaming(traffic))
            await _inject_fault(client, name)
    finally:
        over.set()
        await asking
    counts = traffic.outcomes()
    wrong = traffic.wrong()
    require(not wrong, f"{len(wrong)} of {len(traffic.results)} answers: {wrong[:3]}")
    recovery_s = await _recover(traffic, requests)
    streams = f"{', '.join(map(str, num_streaming))} streams open; {counts[Outcome.IDENTICAL]} answers correct"
    longest_s = max(result.seconds for _, result in traffic.results)
    seen = (
        f"{streams}, {counts[Outcome.ERROR]} clear errors, the slowest after {longest_s:.1f} s; recovered in "
        f"{recovery_s:.1f} s"
    )
    try:
        await client.wait_idle(LEASES_S)
    except Unjudged as unjudged:
        raise Unjudged(f"{seen}; {unjudged}") from None
    return seen


async def _inject_fault(client: Client, name: str) -> None:
    heal = client.admin.get(f"heal-{name}")
    try:
        await _run_command(client.admin[name])
        await asyncio.sleep(FAULT_S * client.slowness)
    finally:
        if heal is not None:
            with suppress(Skipped):  # a supervisor may have replaced the stopped process
                await _run_command(heal)


async def _recover(traffic: Traffic, requests: Sequence[Request]) -> float:
    """Return the seconds until each request is answered as before the fault. Raises Failed after RECOVERY_S."""
    began_s = time.monotonic()

    async def one(request: Request) -> None:
        while (result := await traffic.ask(request)).outcome is not Outcome.IDENTICAL:
            require(result.outcome is Outcome.ERROR, f"after the fault: {result.detail}")
            limit_s = RECOVERY_S * traffic.client.slowness
            late = f"no answer {limit_s:g} s after the fault: {result.detail}"
            require(time.monotonic() < began_s + limit_s, late)
            await asyncio.sleep(traffic.pause_s)

    await in_parallel(one, requests, CONCURRENCY)
    return time.monotonic() - began_s


def _register(fault: str, target: str) -> None:
    async def run(client: Client) -> str:
        name = f"{fault}-{target}"
        if name not in client.admin:
            raise Skipped(f"no --admin {name}=COMMAND")
        return await _inject_faults(client, [name])

    name = f"faults.{fault}-{target}"
    CHECKS[name] = Check(
        name=name,
        suite="faults",
        proves=f"During {fault} of {target} requests get right answers or timely errors; then all recovers.",
        origin="dynamo 11460: no policy for a failed encoder; D hangs when P dies",
        limit_s=3 * ANSWER_S + RECOVERY_S,
        run=run,
    )


for _fault in FAULTS:
    for _part in PARTS:
        _register(_fault, _part)


@check("faults", "a second fault before the first is over", limit_s=600)
async def storm(client: Client) -> str:
    """During random faults of all parts each request gets the right answer or a timely error."""
    known = sorted(name for name in client.admin if not name.startswith("heal-") and "router" not in name)
    if not known:
        raise Skipped("no --admin kill-E=COMMAND or similar")
    rng = random.Random(0)
    names = [rng.choice(known) for _ in range(_STORM_FAULTS)]
    return await _inject_faults(client, names)
