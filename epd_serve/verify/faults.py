"""The suite ``faults``: parts killed, stopped or cut off by commands, and what clients see of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from epd_serve.verify.books import balanced
from epd_serve.verify.check import CHECKS, Check, Failed, Skipped, require
from epd_serve.verify.client import Client, asked, picture

PARTS = ("E", "P", "D", "store", "router")
DEEDS = ("kill", "stop", "partition")
#: Seconds for the answer or the error of a request under a fault, and for the way back to answers.
ANSWER_S, RECOVERY_S = 60.0, 90.0
_LABELS = {"E": "encode", "P": "prefill", "D": "decode"}


def admin_commands(options: Sequence[str]) -> dict[str, str]:
    """Read ``--admin``.

    ``kill-E=COMMAND`` names a command; after ``stop`` and ``partition``, ``heal-stop-E`` and ``heal-partition-E``
    undo them. ``up:PID`` stands for signals to the instances and the gateway of that ``epd-serve up``,
    ``pids:E=12,P=13`` for signals to any processes of this machine, as vLLM's, and ``kubectl:NAMESPACE`` for the
    deletion of pods with llm-d's label of the role.
    """
    commands: dict[str, str] = {}
    known = {f"{deed}-{part}" for deed in DEEDS for part in PARTS}
    known |= {f"heal-{name}" for name in known}
    for option in options:
        if option.startswith("up:"):
            pid = option.removeprefix("up:")
            if not pid.isdecimal():
                raise ValueError(f"--admin {option}: it should look like up:1234, the process of epd-serve up")
            for part in (*_LABELS, "router"):
                commands |= _signals(part, _process_of(part, pid))
        elif option.startswith("pids:"):
            for pair in option.removeprefix("pids:").split(","):
                part, _, pid = pair.partition("=")
                if part not in PARTS or not pid.isdecimal():
                    raise ValueError(f"--admin {option}: it should look like pids:E=12,P=13")
                commands |= _signals(part, pid)
        elif option.startswith("kubectl:"):
            delete = (
                f"kubectl -n {option.removeprefix('kubectl:')} delete pod --wait=false --grace-period=0 --force"
            )
            commands |= {f"kill-{part}": f"{delete} -l llm-d.ai/role={role}" for part, role in _LABELS.items()}
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
    instances = f"$(pgrep -P {up} -f epd_serve.launch.fork_server)"
    return f'$(pgrep -o -P {instances} -f \'"role": "[EPD]*{part}\')'


async def _command(line: str) -> None:
    process = await asyncio.create_subprocess_shell(
        line, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode:
        raise Skipped(f"{line!r} ended with {process.returncode}: {said.decode(errors='replace')[:200]}")


async def _under(client: Client, deed: str, target: str) -> None:
    name = f"{deed}-{target}"
    if name not in client.admin:
        raise Skipped(f"no --admin {name}=COMMAND")
    contents = [asked(picture(color)) for color in ("red", "blue", "lime", "white")]
    wanted = [(await client.chat(content)).text() for content in contents]
    bodies = [client.body(content, stream=True) for content in contents] * 3
    heal = client.admin.get(f"heal-{name}")
    under = [asyncio.create_task(client.post(body, patient=False, timeout_s=ANSWER_S)) for body in bodies]
    await asyncio.sleep(0.1)
    try:
        await _command(client.admin[name])
        replies = await asyncio.gather(*under)
    finally:
        if heal is not None:
            with suppress(Skipped):  # a supervisor may have replaced what was stopped
                await _command(heal)
    for index, reply in enumerate(replies):
        require("not finished within" not in reply.failure, f"neither answer nor error in {ANSWER_S:g} s")
        is_error = reply.status != 200 or not reply.complete or any("error" in event for event in reply.events)
        require(not (is_error and reply.done), "[DONE] after an error")
        require(is_error or reply.text() == wanted[index % 4], f"a wrong answer: {reply.body[-200:]!r}")
    await _recovered(client, contents, wanted)


async def _recovered(client: Client, contents: Sequence[list[object]], wanted: Sequence[str]) -> None:
    end_s = time.monotonic() + RECOVERY_S
    for content, text in zip(contents, wanted, strict=True):
        while True:
            reply = await client.chat(content)
            if reply.status == 200:
                require(reply.text() == text, f"a wrong answer after the fault: {reply.text()!r}, {text!r} before")
                break
            if time.monotonic() > end_s:
                raise Failed(f"no answer {RECOVERY_S:g} s after the fault: status {reply.status}")
            await asyncio.sleep(0.5)
    await balanced(client, 30.0)


def _enter(deed: str, target: str) -> None:
    async def run(client: Client) -> None:
        await _under(client, deed, target)

    name = f"faults.{deed}-{target}"
    CHECKS[name] = Check(
        name=name,
        suite="faults",
        proves=f"With {target} under '{deed}' each answer is right or an error in time; then all is as before.",
        origin="dynamo 11460: no policy for an encoder's failure; D left hanging when P dies",
        limit_s=2 * (ANSWER_S + RECOVERY_S),
        run=run,
    )


for _deed in DEEDS:
    for _part in PARTS:
        _enter(_deed, _part)
