"""A deployment whose work flows like water: a load, a controller, and what comes of it; all of it exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epd_serve.autoscale.controller import Controller, Decision
from epd_serve.autoscale.instance_load import InstanceLoad
from epd_serve.types import Role, Stage, StageRate

STEP = StageRate(0.02, 0.001)


@dataclass(kw_only=True)
class Fluid:
    """``load``: instances that the work of E and P keeps busy; of D, tokens a second. Answers have 100 tokens.

    ``is_unseen``: work of E that does not queue is over before anybody looks.
    """

    roles: list[str]
    load: Mapping[Stage, float]
    switch_s: float = 1.0
    refuses: bool = False
    is_unseen: bool = False
    now_s: float = 0.0
    tick: int = 0
    queue_s: dict[Stage, float] = field(default_factory=lambda: {Stage.ENCODE: 0.0, Stage.PREFILL: 0.0})
    num_decoding: float = 0.0
    sent: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    switching: dict[int, tuple[float, str]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def seen(self) -> list[InstanceLoad]:
        return [
            InstanceLoad(
                name=f"i{number}",
                role=Role.parse(role),
                is_serving=number not in self.switching,
                queue_s={
                    stage: self.waits(stage, number)
                    for stage in self.queue_s
                    if stage in role and number not in self.switching
                },
                num_decoding=self.num_decoding / self.count(Stage.DECODE)
                if "D" in role and number not in self.switching
                else 0.0,
                step=STEP,
                output_tokens=100.0,
                sent=dict(self.sent) if number == 0 else {},
            )
            for number, role in enumerate(self.roles)
        ]

    def waits(self, stage: Stage, number: int) -> float:
        """Without a queue as many instances are busy at a moment as the load keeps so on average."""
        if self.queue_s[stage]:
            return self.queue_s[stage] / self.count(stage)
        if self.is_unseen and stage is Stage.ENCODE:
            return 0.0
        earlier = sum(stage in role and n not in self.switching for n, role in enumerate(self.roles[:number]))
        is_busy = earlier < int(self.load.get(stage, 0.0) * (self.tick + 1)) - int(
            self.load.get(stage, 0.0) * self.tick
        )
        return 0.01 if is_busy else 0.0

    def count(self, stage: Stage) -> int:
        return sum(stage in role and number not in self.switching for number, role in enumerate(self.roles))

    def flow(self, controller: Controller, seconds: float, *, every_s: float = 1.0) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            for number in [n for n, (at_s, _) in self.switching.items() if at_s <= self.now_s]:
                self.roles[number] = self.switching.pop(number)[1]
            for stage in (Stage.ENCODE, Stage.PREFILL):
                num, load = self.count(stage), self.load.get(stage, 0.0)
                self.queue_s[stage] = max(self.queue_s[stage] + (load - num) * every_s, 0.0)
            self.sent[Stage.ENCODE] += self.load.get(Stage.ENCODE, 0.0) * every_s
            self.sent[Stage.DECODE] += self.load.get(Stage.DECODE, 0.0) / 100 * every_s
            for _ in range(5):
                num = self.count(Stage.DECODE)
                per_s = num and self.num_decoding / STEP.seconds(self.num_decoding / num)
                self.num_decoding += (self.load.get(Stage.DECODE, 0.0) - per_s) / 100 * every_s / 5
                self.num_decoding = max(self.num_decoding, 0.0)
            decision = controller.decide(self.now_s, self.seen())
            self.decisions.append(decision)
            if decision.order is not None:
                number = int(decision.order.instance[1:])
                role = self.roles[number] if self.refuses else str(decision.order.role)
                self.switching[number] = (self.now_s + self.switch_s, role)
            self.now_s += every_s
            self.tick += 1

    @property
    def orders(self) -> list[Decision]:
        return [one for one in self.decisions if one.order is not None]

    def layout(self) -> Sequence[str]:
        return sorted(self.roles)
