"""No work is counted twice, none is forgotten."""

from contextlib import closing

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from instance_info import instance_info

from epd_serve.cost.stages import Work
from epd_serve.protocol.instance_state import Load, Report
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage


def prompt(num_tokens):
    return Work(num_tokens=num_tokens)


def test_items_of_one_request_are_reported_one_by_one(build):
    table = build("e0:E", "p0:P")
    with (
        table.open_encode(table["e0"], build.item("a", 100), "r"),
        table.open_encode(table["e0"], build.item("b", 100), "r"),
    ):
        table.report("e0", Report(load=build.load("pixels=100"), received=["Er"]))
        assert table["e0"].pending.num_pixels == 200
        table.report("e0", Report(load=build.load("pixels=200"), received=["Er"]))
        assert table["e0"].pending.num_pixels == 200
    assert table["e0"].pending.num_pixels == 0


def test_an_answer_to_info_contains_the_calls_before_the_question(build):
    table = build("p0:P", "d0:D")
    with closing(table.open_call(table["p0"], Stage.PREFILL, request_id="a", work=prompt(100))):
        asked = table.num_calls
        with closing(table.open_call(table["p0"], Stage.PREFILL, request_id="b", work=prompt(10))):
            table.update("p0", table["p0"].info, contains=asked)
            assert table["p0"].pending.num_tokens == 10


def test_restarts_before_and_after_the_start_of_a_gateway_count(build):
    table = build("p0:P")
    for pid, told, total in ((7, 2, 2), (8, 3, 3), (9, 0, 4)):  # the last one was started by hand
        table.update("p0", instance_info("p0", pid=pid, num_restarts=told))
        assert table["p0"].num_restarts == total


class Accounts(RuleBasedStateMachine):
    """A gateway, an instance and the wires between: what is pending is what the instance has to do, plus what is
    on its way to it, minus what ended since it last reported."""

    def __init__(self):
        super().__init__()
        self.table = InstanceTable([("p0", "")])
        self.table.update("p0", instance_info("p0"), contains=0)
        self.calls = {}  # request id → (open call, tokens)
        self.on_the_way = []
        self.at_instance = {}
        self.unreported_arrivals = []
        self.ended_since = 0
        self.reported = 0
        self.acknowledged = set()
        self.number = 0

    @rule(tokens=st.integers(1, 1000))
    def call(self, tokens):
        self.number += 1
        request_id = str(self.number)
        opened = self.table.open_call(self.table["p0"], Stage.PREFILL, request_id=request_id, work=prompt(tokens))
        self.calls[request_id] = (opened, tokens)
        self.on_the_way.append(request_id)

    @rule(tokens=st.integers(1, 1000))
    def arrive_from_another_gateway(self, tokens):
        self.number += 1
        self.at_instance[f"another's {self.number}"] = tokens

    @rule()
    def arrive(self):
        if self.on_the_way:
            request_id = self.on_the_way.pop(0)
            self.at_instance[request_id] = self.calls[request_id][1] if request_id in self.calls else 0
            self.unreported_arrivals.append(request_id)

    @rule()
    def report(self):
        self.reported = sum(self.at_instance.values())
        received = ["P" + one for one in self.unreported_arrivals]
        self.table.report("p0", Report(load=Load(num_waiting_tokens=self.reported), received=received))
        self.acknowledged |= set(self.unreported_arrivals)
        self.unreported_arrivals = []
        self.ended_since = 0

    @rule(data=st.data())
    def end(self, data):
        if self.calls:
            request_id = data.draw(st.sampled_from(sorted(self.calls)))
            opened, tokens = self.calls.pop(request_id)
            opened.close()
            self.at_instance.pop(request_id, None)
            if request_id in self.acknowledged:
                self.ended_since += tokens

    @invariant()
    def adds_up(self):
        unknown = sum(tokens for one, (_, tokens) in self.calls.items() if one not in self.acknowledged)
        expected = self.reported - self.ended_since + unknown
        assert self.table["p0"].pending.num_tokens == pytest.approx(expected)
        if not self.calls:
            assert self.table["p0"].in_flight[Stage.PREFILL] == 0


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=25, stateful_step_count=25)
