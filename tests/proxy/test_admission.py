"""The admission queue against a model of it: no request is lost or admitted twice, and each one's turn comes."""

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.errors import InvalidRequest, Overloaded
from proxy.admission.keys import Client, KeyLimits
from proxy.admission.queue import AdmissionQueue, TicketState


class AdmissionMachine(RuleBasedStateMachine):
    """Random arrivals, ends and cancellations. The model: lists of the running and the waiting."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.runner.get_loop()
        self.queue = AdmissionQueue(2, 5)
        self.running, self.waiting = [], []  # waiting: (priority, number, ticket)
        self.num_entered = 0

    def call(self, function, *args):
        async def run():
            return function(*args)

        return self.runner.run(run())

    def admit(self):
        while self.waiting and self.num_in_flight() < self.queue.max_in_flight:
            self.waiting.sort(key=lambda entry: entry[:2])
            self.running.append(self.waiting.pop(0)[2])

    def num_in_flight(self):
        return sum(ticket.num_choices for ticket in self.running)

    @rule(priority=st.integers(-1, 1), num_choices=st.integers(1, 3))
    def enter(self, priority, num_choices):
        self.num_entered += 1
        is_full = self.num_in_flight() >= self.queue.max_in_flight
        if is_full and len(self.waiting) >= self.queue.max_queue:
            with pytest.raises(Overloaded):
                self.call(self.queue.enter, priority, num_choices)
            return
        ticket = self.call(self.queue.enter, priority, num_choices)
        if is_full:
            self.waiting.append((priority, self.num_entered, ticket))
        else:
            self.running.append(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.call(self.queue.leave, ticket)
        self.admit()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data):
        *_, ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.call(self.queue.leave, ticket)

    @invariant()
    def agrees(self):
        queue = self.queue
        assert queue.num_in_flight == self.num_in_flight()
        assert (queue.num_running, queue.num_waiting) == (len(self.running), len(self.waiting))
        assert all(ticket.state is TicketState.RUNNING for ticket in self.running)
        assert all(ticket.admitted is None or ticket.admitted.done() for ticket in self.running)
        assert all(ticket.state is TicketState.WAITING for *_, ticket in self.waiting)

    def teardown(self):
        self.runner.close()


TestAdmission = AdmissionMachine.TestCase


def test_the_limit_of_a_key_counts_choices():
    client = Client("a", KeyLimits(max_concurrent=4))
    client.enter()
    with pytest.raises(InvalidRequest) as too_many:
        client.widen(5)
    assert too_many.value.param == "n"
    client.widen(3)
    client.enter()
    with pytest.raises(Overloaded) as refused:
        client.widen(2)
    assert refused.value.code == "rate_limit_exceeded"
    with pytest.raises(Overloaded):
        client.enter()
    client.leave()
    client.leave(3)
    assert client.num_active == 0
