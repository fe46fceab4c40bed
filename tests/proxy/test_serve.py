"""One request under arbitrary faults and orders of events, with scripted instances on virtual time."""

import asyncio
import selectors
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from gateway_settings import gateway_settings
from hypothesis import given, settings
from hypothesis import strategies as st
from instance_info import instance_info
from msgspec.structs import replace

from epd_serve import errors
from epd_serve.errors import InstanceFailed, InstanceLost, ServeError
from epd_serve.protocol import wire
from epd_serve.protocol.wire import EncodeReply, MediaRef
from epd_serve.routing.retry import MAX_ATTEMPTS
from epd_serve.rpc import items
from epd_serve.telemetry.span import TraceContext
from epd_serve.types import SamplingParams
from proxy.fleet import Fleet
from proxy.media.loader import MediaItem
from proxy.observe.record import RequestRecord
from proxy.serving.forwarding import EventSink
from proxy.serving.job import Job
from proxy.serving.serve import serve_stream, serve_whole

T = TypeVar("T")
ROLES = {"e0": "E", "e1": "E", "p0": "P", "p1": "P", "d0": "D", "d1": "D", "a0": "EPD"}
NUM_TOKENS = 6
FINGERPRINT = "f"
LOST = InstanceLost("gone")
PLANNED = [errors.Unavailable("it leaves", code=code) for code in (errors.DRAINING, errors.DECODE_DRAINING)]
FAILURES = [
    LOST,
    errors.InstanceUnreachable("not there"),
    InstanceFailed("broken"),
    InstanceFailed("cut off", code=errors.PEER_UNREACHABLE),
    errors.StageTimeout("late"),
    errors.Unavailable("no room", code=errors.NO_ROOM),
    errors.Unavailable("ended", code=errors.REQUEST_ENDED),
    errors.Overloaded("too many", code=errors.PREPARATION_FULL),
    errors.Conflict("changing"),
    errors.InvalidRequest("wrong"),
    *PLANNED,
]
#: Draws for so many events; after them, the first of what may happen does.
NUM_DRAWN = 40
DONE = b"data: [DONE]\n\n"


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing else is to do."""

    def __init__(self):
        self.now_s = 100.0
        loop = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout=None):
                loop.now_s += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self):
        return self.now_s


class Call:
    """A call to P or D, and its answer."""

    prompt_note = ""

    def __init__(self, world, name, request_id, *, knows_tokens):
        self.world = world
        self.name = name
        self.request_id = request_id
        self.knows_tokens = knows_tokens
        self.decode_follows = False
        self.opened: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self.num_closed = 0
        self.is_over = False
        self.reading: asyncio.Future[bool] | None = None
        self._write: Callable[[bytes], bool] | None = None
        self._body = []

    def close(self):
        self.num_closed += 1
        self.opened.cancel()
        if self.opened.done() and not self.opened.cancelled():
            self.opened.exception()

    async def forward(self, write):
        if self.is_over:
            return True
        self._write, self.reading = write, asyncio.get_running_loop().create_future()
        try:
            return await self.reading
        finally:
            self._write = None

    async def chunks(self):
        await self.forward(lambda data: self._body.append(data) or True)
        for chunk in self._body:
            yield chunk

    @property
    def is_read(self):
        return self._write is not None and self.reading is not None and not self.reading.done()

    def send(self, data):
        """Hand bytes to the reader, which may want no more for now."""
        assert self._write is not None and self.reading is not None
        if not self._write(data):
            self.reading.set_result(False)

    def end(self, error=None):
        if error is not None:
            self.reading.set_exception(error)
            return
        self.is_over = True
        if self.is_read:
            self.reading.set_result(True)


class Instance:
    """One instance's calls."""

    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.url = f"http://{name}"

    async def encode(self, request, *, trace_id):
        world, done = self.world, asyncio.get_running_loop().create_future()
        assert request.ref.mm_hash not in world.encodes, "one instance at a time"
        assert world.is_calling, "no encode outlives its attempt"
        world.encodes[request.ref.mm_hash] = done
        world.encoded.add(request.ref.mm_hash)
        try:
            return await done
        finally:
            del world.encodes[request.ref.mm_hash]

    def prefill(self, request, *, trace_id, media):
        world = self.world
        assert not world.is_calling and not world.encodes, "one attempt at a time"
        assert request.generated == (world.tokens(0) if world.begun else []), "behind what the client has"
        assert [replace(ref, num_segments=1) for ref in request.items] == world.refs
        world.asked = {part.mm_hash for ref in request.items for part in ref.segments}
        world.encoded = set()
        world.num_attempts += 1
        world.next = [len(request.generated)] * world.num_choices
        world.is_fused = request.decode_url is None
        return world.open(self.name, request.request_id)

    def decode(self, request, *, trace_id):
        assert [call.request_id for call in self.world.calls if not call.num_closed] == [request.request_id]
        return self.world.open(self.name, request.request_id)


class Outlet:
    """The client."""

    def __init__(self, world):
        self.world = world
        self.got = bytearray()

    def start(self, headers):
        self.got.clear()

    def write(self, data, *, last=False):
        self.got += data
        return self.world.pick(True, True, False)

    async def drain(self):
        await asyncio.sleep(0)


class World:
    """Instances and the client of one request; whatever may happen next is drawn, or regular without ``data``.

    Attributes:
        calls: to P and D, all that were opened.
        next: the next token of the attempt under way, by choice; a token is its place in the answer.
    """

    def __init__(self, data, *, num_items, num_choices, streams):
        self.data = data
        self.num_steps = 0
        self.num_choices = num_choices
        self.streams = streams
        self.knows_tokens = self.pick(True, True, True, False)
        self.calls = []
        self.next = []
        self.is_fused = False
        self.num_attempts = self.num_planned = 0
        self.encodes = {}
        self.asked = set()
        self.encoded = set()
        # the last two items are the same picture
        unnamed = [MediaRef("", width=10, height=10) for n in range(num_items)]
        if num_items and self.pick(True, False):  # a video for which more than one encoder pays
            unnamed[0] = MediaRef("", 900, 900, "video", num_frames=self.pick(400, 5), fps=2.0)
        self.items = [MediaItem(data=b"%d" % min(n, 2), ref=ref, param="param") for n, ref in enumerate(unnamed)]
        self.refs = []
        chosen = gateway_settings(restart=self.pick("never", "on-failure"))
        instances = [(name, f"http://{name}") for name in ROLES]
        connect = lambda name, _: Instance(self, name)  # noqa: E731
        self.fleet = Fleet(chosen, instances, connect)
        self.table = self.fleet.table
        for name in ROLES:
            self._return(name, 1)
        self.fleet.complete_at_s = self.pick(100.0, None)
        self.record = RequestRecord("chat", TraceContext("0" * 32, "0" * 16), "r", 0.0)
        self.client = Outlet(self)
        self.sink = EventSink(self.client, self.record)

    @property
    def begun(self):
        return self.sink.started

    @property
    def is_calling(self):
        return any(not call.num_closed for call in self.calls)

    def tokens(self, choice):
        events = [event.removeprefix(b"data: ") for event in bytes(self.client.got).split(b"\n\n")[:-1]]
        pairs = [event.split(b" ") for event in events if event != b"[DONE]"]
        return [int(token) for of, token in pairs if int(of) == choice]

    def pick(self, *options):
        if self.data is None or self.num_steps > NUM_DRAWN:
            return options[0]
        return self.data.draw(st.sampled_from(options))

    def open(self, name, request_id):
        call = Call(self, name, request_id, knows_tokens=self.knows_tokens)
        self.calls.append(call)
        return call

    def job(self, loop):
        return Job(
            id="r",
            output=wire.OutputOptions("chat", "r", 0, "m", stream=self.streams),
            sampling=SamplingParams(seed=1, n=self.num_choices),
            messages=None,
            prompt="once",
            items=self.items,
            record=self.record,
            prompting=wire.PromptOptions(),
            loop=loop,
        )

    # what may happen

    def happen(self):
        """One of the things that may happen now, the regular ones first."""
        self.num_steps += 1
        may = []
        for call in self.calls:
            if call.num_closed:
                continue
            if not call.opened.done():
                may += [partial(self._open, call)] * 2
            elif call.is_read:
                may += [partial(self._answer, call)] * 4
        may += [partial(self._encode, done) for done in self.encodes.values() if not done.done()]
        self.pick(*may, self._change_table)()

    def _failure(self):
        failure = self.pick(*FAILURES)
        self.num_planned += failure in PLANNED
        return failure

    def _return(self, name, pid):
        info = instance_info(name, ROLES[name], pid=pid, splits_videos=True)
        self.table.update(name, info, contains=self.table.num_calls)

    def _change_table(self):
        name = self.pick(*ROLES)
        match self.pick("nothing", "back", "lost", "down"):
            case "lost":
                self.table.mark_lost(name)
            case "back":
                self._return(name, self.pick(1, 2))
            case "down":
                self.fleet.report_down(name)

    def _open(self, call):
        if self.pick(True, True, False):
            is_prefill = call is next(one for one in self.calls if one.request_id == call.request_id)
            # P of a pair may answer all by itself; a single instance may say nonsense
            call.decode_follows = is_prefill and (self.pick(*range(6)) < 5) is not self.is_fused
            call.opened.set_result(call)
        else:
            call.opened.set_exception(self._failure())

    def _encode(self, done):
        if self.pick(True, False):
            done.set_result(EncodeReply(cached=False))
        else:
            done.set_exception(self._failure())

    def _answer(self, call):
        """Some tokens come, then the end or a failure, or nothing yet."""
        is_last = not call.decode_follows
        what = self.pick("end", "early end", "lost", "said", "unreadable", "nothing", "lost behind the end")
        is_whole = is_last and what in ("end", "lost behind the end")
        for choice in range(self.num_choices if self.streams else 0):
            left = NUM_TOKENS - self.next[choice]
            for _ in range(left if is_whole else self.pick(*range(min(left, 1) + 1 if not is_last else left + 1))):
                if call.is_read:
                    number = self.next[choice]
                    self.next[choice] += 1
                    event = b"data: %d %d\n\n" % (choice, number)
                    call.send(items.pack(choice, (number,) if call.knows_tokens else (), event))
        if what == "nothing" or not call.is_read:
            return
        if is_whole:
            call.send(items.pack(items.END, (), DONE) if self.streams else b"{}")
            if not call.is_read:  # the client takes the end slowly
                call.end()
                return
        if what in ("end", "early end"):
            call.end()
        elif what == "said" and self.streams and call.knows_tokens:
            event = b"data: " + self._failure().to_json() + b"\n\n"
            call.send(items.pack(items.ERROR, (), event))
        elif what == "unreadable":
            call.end(self._failure())
        else:
            call.end(InstanceLost("broke off"))


async def run(world):
    """Return the whole answer, or what the request ended with."""
    loop = asyncio.get_running_loop()
    job = world.job(loop)
    world.refs = [await item.name(FINGERPRINT) for item in world.items]
    if world.streams:
        serving: asyncio.Task[Any] = loop.create_task(serve_stream(world.fleet, job, world.sink))
    else:
        serving = loop.create_task(serve_whole(world.fleet, job))
    patience = world.pick(None, None, None, *range(1, 30))
    while not serving.done():
        for _ in range(12):  # all that follows from an event
            await asyncio.sleep(0)
        if serving.done():
            break
        assert world.asked == world.encoded, "each item, and each segment of a video, is encoded at once"
        if world.num_steps == patience:
            serving.cancel()
        world.happen()
        is_over = world.num_steps > NUM_DRAWN  # a request that waits for an instance needs time to give up
        await asyncio.sleep(1.0 if is_over else world.pick(0.0, 0.0, 0.06, 8.0))
        assert world.num_steps < 1000
    await asyncio.wait([serving])
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "nothing runs on"
    if serving.cancelled():
        assert world.num_steps >= (patience or 1000)
        return None, asyncio.CancelledError()
    return (None, error) if (error := serving.exception()) is not None else (serving.result(), None)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_items=st.integers(0, 4), num_choices=st.integers(1, 2), streams=st.booleans())
def test_every_request_comes_to_one_end(data, num_items, num_choices, streams):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world = World(data, num_items=num_items, num_choices=num_choices, streams=streams)
        body, error = runner.run(run(world))
    assert all(call.num_closed == 1 for call in world.calls), "each call that was opened is closed once"
    assert not world.encodes and not world.fleet.watchers
    assert not any(sum(record.in_flight.values()) for record in world.table)
    assert world.num_attempts <= MAX_ATTEMPTS + world.num_planned
    assert isinstance(error, ServeError | asyncio.CancelledError | None), repr(error)
    for choice in range(num_choices):
        tokens = world.tokens(choice)
        assert tokens == list(range(NUM_TOKENS if streams and error is None else len(tokens)))
    if error is None:
        assert world.client.got.endswith(DONE) if streams else body == b"{}"
    elif streams and isinstance(error, ServeError):
        assert not world.client.got.endswith(DONE)
        assert (error.code == errors.CHOICES_LOST) <= (num_choices > 1 and world.begun)
