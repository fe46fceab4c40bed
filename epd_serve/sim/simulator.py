"""Build a simulated deployment from a topology and devices, and run requests through it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from epd_serve.cost.profile import Profile
from epd_serve.cost.stages import NETWORK, SAME_DEVICE, Link
from epd_serve.routing.routes import RoutePolicy, Router
from epd_serve.sched.sequence import Sequence as SequenceOfTokens
from epd_serve.sim.device import Clock, SimDevice
from epd_serve.sim.gateway import Job, SimGateway
from epd_serve.sim.instance import SimInstance
from epd_serve.sim.language import LanguageSide
from epd_serve.sim.spec import Batching, SimInstanceSpec, with_memory
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import Topology, place
from epd_serve.topology.placement import CPU
from epd_serve.types import Role, Routing

#: Report interval of instances (instance/reports.py).
REPORT_S = 0.18
_COLLECT = 200_000, 20, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SimDeployment:
    """Instances behind one gateway."""

    instances: tuple[SimInstanceSpec, ...]
    routing: Routing = "least_loaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        jobs: in the order of the requests.
        busy: share of time in which each device was busy.
        encoded: items that were encoded, not found in a store.
    """

    jobs: list[Job]
    seconds: float
    busy: dict[str, float]
    encoded: int
    num_steps: int
    num_events: int
    gateways: list[SimGateway]
    instances: dict[str, SimInstance]


class NoWay(ValueError):
    """The deployment cannot work, for example because the weights do not fit."""


@contextmanager
def _rare_gc() -> Iterator[None]:
    """Collect garbage rarely: a run makes many objects but few cycles, and collection took 1/8 of its time."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECT)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Operator(Protocol):
    """Changes instances while a simulation runs."""

    def begin(
        self,
        clock: Clock,
        gateway: SimGateway,
        instances: dict[str, SimInstance],
        start: Callable[[SimInstanceSpec, int], None],
    ) -> None:
        """Begin; ``start(spec, pid)`` replaces the instance of that name."""

    def tick(self) -> None:
        """Run after each round of reports."""


def simulate(
    deployment: SimDeployment,
    requests: Sequence[SimRequest],
    *,
    give_up: Callable[[list[Job]], bool] | None = None,
    operator: Operator | None = None,
    routers: Sequence[Router] = (),
) -> Outcome:
    """Run all requests to their ends; deterministic.

    Args:
        give_up: called with the finished jobs after each report; True stops the run.
        operator: changes instances, each alone on its device.
        routers: one per gateway, which take requests in turn; default: one gateway with the deployment's routing.
    """
    clock = Clock()
    devices: dict[str, SimDevice] = {}
    instances: dict[str, SimInstance] = {}
    every: list[SimInstance] = []
    done: list[Job] = []

    def link(one: SimInstance, other: SimInstance) -> Link:
        if one.spec.host != other.spec.host:
            return NETWORK
        if one.spec.device == other.spec.device:
            return SAME_DEVICE
        return Link(handshake_s=one.spec.profile.handshake_s, bytes_per_s=one.spec.profile.link_bytes_per_s)

    def start(spec: SimInstanceSpec, pid: int = 1) -> None:
        if spec.role.has_language_model and spec.num_blocks < 8 + spec.state_blocks:
            raise NoWay(f"{spec.name}: the weights leave no room for KV on {spec.device}")
        place = f"{spec.host}/{spec.device}"
        if place not in devices:
            devices[place] = SimDevice(clock)
        instances[spec.name] = one = SimInstance(
            clock,
            devices[place],
            spec,
            on_prompt=lambda instance, sequence: gateway_of(sequence).prompt_done(instance, sequence),
            on_end=lambda sequence: gateway_of(sequence).ended(sequence),
        )
        one.pid = pid
        every.append(one)

    for spec in deployment.instances:
        start(spec)
    gateways = [
        SimGateway(clock, instances, router, link=link, on_done=done.append)
        for router in routers or [Router(RoutePolicy(deployment.routing))]
    ]

    def gateway_of(sequence: SequenceOfTokens) -> SimGateway:
        return next(one for one in gateways if one.has(sequence))

    jobs = [
        Job(number=number, request=request, num_tokens=0, sent_s=request.at_s)
        for number, request in enumerate(requests)
    ]
    given_up = False

    def arrive(index: int) -> None:
        gateways[index % len(gateways)].serve(jobs[index])
        if index + 1 < len(jobs):
            clock.at(jobs[index + 1].sent_s, lambda: arrive(index + 1))

    def report_all() -> None:
        nonlocal given_up
        for name, instance in instances.items():
            if instance.is_changed:
                report = instance.report()
                for gateway in gateways:
                    gateway.table.report(name, report)
        for gateway in gateways:
            gateway.note_stages()
        if operator is not None:
            operator.tick()
        if not clock.has_events and len(done) < len(jobs):
            raise RuntimeError(f"at {clock.now:.3f} s {len(jobs) - len(done)} requests are stuck")
        given_up = given_up or (give_up is not None and give_up(done))
        clock.after(REPORT_S, report_all)

    if operator is not None:
        operator.begin(clock, gateways[0], instances, start)
    if jobs:
        clock.at(jobs[0].sent_s, lambda: arrive(0))
    clock.at(0.0, report_all)

    def languages() -> list[LanguageSide]:
        """Return all language models, including those of replaced instances."""
        return [one.language for one in every if one.language is not None]

    with _rare_gc():
        clock.run(lambda: len(done) == len(jobs) or given_up)
        seconds = clock.now
        clock.run(lambda: given_up or not any(one.is_busy for one in languages()))  # their last steps
    return Outcome(
        jobs=jobs,
        seconds=seconds,
        busy={name: device.busy_s / seconds if seconds else 0.0 for name, device in devices.items()},
        encoded=sum(one.tower.num_encoded for one in every),
        num_steps=sum(one.num_steps for one in languages()),
        num_events=clock.num_events,
        gateways=gateways,
        instances=instances,
    )


DEFAULT = Batching()


def build(
    topology: Topology,
    devices: Sequence[str],
    profile_of: Callable[[str, int], Profile],
    *,
    batching: Batching | Callable[[Role], Batching] = DEFAULT,
    routing: Routing = "least_loaded",
    host_of: Callable[[str], str] = lambda device: "host0",
    block_size: int | None = None,
    num_blocks: int | None = None,
    assist: bool = False,
) -> SimDeployment:
    """Place instances on devices like ``epd-serve up``.

    Language models on one device share its memory equally. On a CPU, instances have their own cores unless the
    notation co-locates them.

    Args:
        profile_of: returns the profile for a device name and a tensor-parallel width.
        assist: whether EPD instances assist the others.
    """
    placed = place(topology, devices)
    specs: list[SimInstanceSpec] = []
    for one in placed:
        device = one.devices[0]
        profile = profile_of(device, one.tensor_parallel)
        neighbours = [other for other in placed if other.name in (one.name, *one.shares_device_with)]
        num_models = max(sum(other.role.has_language_model for other in neighbours), 1)
        size = block_size or (128 if profile.device.startswith(("npu", "ascend")) else 16)
        spec = SimInstanceSpec(
            name=one.name,
            role=one.role,
            profile=profile,
            device=f"{CPU}:{min(other.name for other in neighbours)}" if device == CPU else device,
            host=host_of(device),
            num_blocks=num_blocks or 2,
            block_size=size,
            batching=batching(one.role) if callable(batching) else batching,
            runs_ahead=device != CPU,
            assists=assist and str(one.role) == "EPD",
        )
        if num_blocks is None:
            towers = any(other.role.encodes for other in neighbours)
            spec = with_memory(spec, share=1 / num_models, beside_tower=towers)
        specs.append(spec)
    return SimDeployment(instances=tuple(specs), routing=routing)
