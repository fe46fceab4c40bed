"""The workers of a gateway as one of them sees them, and what they tell each other through their parent."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from epd_serve.errors import Unavailable
from epd_serve.rpc.link import LinkClosed
from proxy.admission.ledger import Ledger
from proxy.workers.channel import NOTHING, CallFailed, Channel
from proxy.workers.worker_setup import WorkerSetup

T = TypeVar("T")

#: A worker that stands still for longer is left out of what is asked of all.
ANSWER_S = 1.0


class Crew:
    """One worker among ``setup.count``; without a setup a gateway of one process, with nobody to tell or ask.

    What the gateway's parts have to say is put into ``shown`` and ``on_...`` before :meth:`join`.

    Attributes:
        shown: by name, what the others may ask: a function that gives something for MessagePack.
        on_drained, on_joined, on_left, on_switched: what another worker was told and this one takes over.
        on_config: a deployment, as JSON, that the others took over before this one was started again.
        on_stop, on_end, on_reload: told by the parent: finish, finish at once, read the deployment file.
        ledger: what API keys have used, at all workers together.
    """

    def __init__(self, setup: WorkerSetup | None = None) -> None:
        self.setup = setup
        self.ledger = None if setup is None else Ledger(setup.ledger, setup.count, setup.index)
        self.shown: dict[str, Callable[[], Any]] = {}
        self.on_drained: Callable[[Drained], None] = lambda change: None
        self.on_joined: Callable[[Joined], None] = lambda change: None
        self.on_left: Callable[[Left], None] = lambda change: None
        self.on_switched: Callable[[Switched], None] = lambda change: None
        self.on_config: Callable[[str], None] = lambda config: None
        self.on_stop: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_reload: Callable[[], None] = lambda: None
        self._channel = Channel(
            {
                "ping": self._nothing,
                "show": self._show,
                "change": self._change,
                "stop": self._call(lambda: self.on_stop()),
                "end": self._call(lambda: self.on_end()),
                "reload": self._call(lambda: self.on_reload()),
            }
        )
        self._running: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        """Whether it is the one that does what one alone must do."""
        return self.setup is None or self.setup.leads

    def admin_socket(self) -> socket.socket | None:
        """The socket that the admin plane has inherited; None where it makes its own."""
        if self.setup is None or self.setup.admin is None:
            return None
        return socket.socket(fileno=os.dup(self.setup.admin))

    async def join(self) -> None:
        """Be one of them, and know what they know, from now until :meth:`leave`."""
        if self.setup is None:
            return
        sock = socket.socket(fileno=self.setup.channel)
        await self._channel.open(sock)
        self._running = asyncio.create_task(self._run())
        shared = await self._channel.call("join", timeout_s=30)
        known = msgspec.msgpack.decode(shared, type=Shared)
        if known.config:
            self.on_config(known.config)
        for change in known.changes():
            self._take_over(change)
        if known.again:
            self.on_reload()  # what has changed since

    async def leave(self) -> None:
        """Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def share(self, change: Change) -> list[int]:
        """Return when all workers have taken ``change`` over, or else which of them have not said so in time: they
        will as soon as they go on, unless a fault is in their logs or the parent's. One that is being started will
        know it."""
        if self.setup is None:
            return []
        try:
            answer = await self._channel.call("share", change, timeout_s=2 * ANSWER_S)
        except LinkClosed:
            return []  # without the parent, all of them end
        except (CallFailed, TimeoutError):
            return [index for index in range(self.setup.count) if index != self.setup.index]
        return msgspec.msgpack.decode(answer, type=list[int])

    def tell(self, change: Change) -> None:
        """The same without waiting."""
        if self.setup is not None:
            self._channel.tell("share", change)

    async def ask(self, name: str, kind: type[T]) -> list[T]:
        """Return what each other worker shows under ``name``, of those that answer in time."""
        answers, _ = await self._ask(name, kind)
        return answers

    async def ask_all(self, name: str, kind: type[T]) -> list[T] | None:
        """The same of all that serve; None where any of them is silent."""
        answers, all_have = await self._ask(name, kind)
        return answers if all_have else None

    async def _ask(self, name: str, kind: type[T]) -> tuple[list[T], bool]:
        """The answers, and whether there is nobody else who could have given one."""
        if self.setup is None:
            return [], True
        try:
            answer = await self._channel.call("ask", name, timeout_s=2 * ANSWER_S)
        except (LinkClosed, CallFailed, TimeoutError):
            return [], False
        asked = msgspec.msgpack.decode(answer, type=Asked)
        return [msgspec.msgpack.decode(body, type=kind) for body in asked.answers], not asked.silent

    async def metrics(self) -> bytes:
        """The exposition text of all workers together, for one that has a setup. Raises Unavailable."""
        try:
            answer = await self._channel.call("metrics", timeout_s=2 * ANSWER_S)
        except (LinkClosed, CallFailed, TimeoutError) as error:
            raise Unavailable("what the gateway's processes have counted cannot be added up now") from error
        return msgspec.msgpack.decode(answer, type=bytes)

    async def _run(self) -> None:
        await self._channel.run()
        self.on_stop()  # without its parent there is nobody who would start it again

    @staticmethod
    async def _nothing(_: bytes) -> bytes:
        return NOTHING

    @staticmethod
    def _call(function: Callable[[], None]) -> Any:
        async def answer(_: bytes) -> bytes:
            function()
            return NOTHING

        return answer

    async def _show(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(self.shown[msgspec.msgpack.decode(body, type=str)]())

    async def _change(self, body: bytes) -> bytes:
        self._take_over(msgspec.msgpack.decode(body, type=Change))
        return NOTHING

    def _take_over(self, change: Change) -> None:
        match change:
            case Drained():
                self.on_drained(change)
            case Joined() if change.deadline_s > time.monotonic():
                self.on_joined(change)
            case Left():
                self.on_left(change)
            case Switched():
                self.on_switched(change)


class Drained(msgspec.Struct, frozen=True, tag=True):
    """An operator has taken the instance at ``url`` out of service, or back."""

    name: str
    url: str
    on: bool


class Joined(msgspec.Struct, frozen=True, tag=True):
    """An instance has joined, or renewed its lease: until ``deadline_s`` of the monotonic clock, which is one for
    all processes of a machine."""

    name: str
    url: str
    deadline_s: float
    role: str | None = None
    incarnation: int = 0


class Left(msgspec.Struct, frozen=True, tag=True):
    """An instance that had joined is gone."""

    name: str


class Switched(msgspec.Struct, frozen=True, tag=True):
    """The vLLM instance at ``url`` is used in another role, or is about to be: it gets nothing new for at most
    ``held_s`` seconds."""

    name: str
    url: str
    role: str
    held_s: float = 0.0


class TakenOver(msgspec.Struct, frozen=True, tag=True):
    """The deployment file was read again and taken over, as each worker does by itself; ``config`` is what it has,
    as JSON, ``instances`` are those of it: URLs by name."""

    config: str
    instances: dict[str, str]


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """The other workers' answers, as MessagePack, and which of those that serve have not answered."""

    answers: list[bytes]
    silent: list[int]


Change = Drained | Joined | Left | Switched | TakenOver


class Shared(msgspec.Struct, kw_only=True):
    """The knowledge that every worker needs; the parent keeps it for those that are started again.

    ``config``: of the last :class:`TakenOver`, "" before the first. ``again``: the worker has had a life before.
    """

    drained: dict[str, Drained] = msgspec.field(default_factory=dict)
    joined: dict[str, Joined] = msgspec.field(default_factory=dict)
    switched: dict[str, Switched] = msgspec.field(default_factory=dict)
    config: str = ""
    again: bool = False

    def apply(self, change: Change, now_s: float) -> None:
        """From now on; leases that are over by ``now_s`` are forgotten."""
        match change:
            case Drained(name, on=True):
                self.drained[name] = change
            case Drained(name):
                self.drained.pop(name, None)
            case Joined(name):
                self.joined[name] = change
            case Left(name):
                self._forget(name)
            case Switched(name):
                if not change.held_s:
                    self.switched[name] = change
            case TakenOver(config, instances):
                self.config = config
                here = instances | {name: joined.url for name, joined in self.joined.items()}
                for known in (self.drained, self.switched):
                    for name in [name for name, one in known.items() if here.get(name) != one.url]:
                        del known[name]
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Forget whose lease is over by now."""
        for name in [name for name, joined in self.joined.items() if joined.deadline_s <= now_s]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """One that joins under this name later is another instance: no worker has it drained."""
        for known in (self.joined, self.drained, self.switched):
            known.pop(name, None)

    def changes(self) -> list[Change]:
        """The changes that lead here from a fresh start, but for the deployment file."""
        return [*self.joined.values(), *self.switched.values(), *self.drained.values()]
