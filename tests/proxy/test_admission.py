"""The admission queue against a model of it: no request is lost or admitted twice, and each one's turn comes."""

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.errors import InvalidRequest, Overloaded
from proxy.admission import AdmissionQueue, Holder, Visit, VisitState


class AdmissionMachine(RuleBasedStateMachine):
    """Random arrivals, ends and cancellations. The model: lists of the running and the waiting."""

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.runner.get_loop()
        self.queue = AdmissionQueue(2, 5, 60.0)
        self.running, self.waiting = [], []  # waiting: (priority, number, visit)
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
        return sum(visit.num_choices for visit in self.running)

    @rule(priority=st.integers(-1, 1), num_choices=st.integers(1, 3))
    def enter(self, priority, num_choices):
        self.num_entered += 1
        is_full = self.num_in_flight() >= self.queue.max_in_flight
        visit = Visit(Holder("a"), self.queue, priority, num_choices)
        if is_full and len(self.waiting) >= self.queue.max_queue:
            with pytest.raises(Overloaded):
                self.call(self.queue.enter, visit)
            return
        self.call(self.queue.enter, visit)
        if is_full:
            self.waiting.append((priority, self.num_entered, visit))
        else:
            self.running.append(visit)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        visit = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.call(self.queue.leave, visit)
        self.admit()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data):
        *_, visit = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.call(self.queue.leave, visit)

    @invariant()
    def agrees(self):
        queue = self.queue
        assert queue.num_in_flight == self.num_in_flight()
        assert (queue.num_running, queue.num_waiting) == (len(self.running), len(self.waiting))
        assert all(visit.state is VisitState.RUNNING for visit in self.running)
        assert all(visit.admitted is None or visit.admitted.done() for visit in self.running)
        assert all(visit.state is VisitState.WAITING for *_, visit in self.waiting)

    def teardown(self):
        self.runner.close()


TestAdmission = AdmissionMachine.TestCase


def test_the_limit_of_a_key_counts_choices():
    holder = Holder("a", max_concurrent=4)
    holder.enter()
    with pytest.raises(InvalidRequest) as too_many:
        holder.count_choices(5)
    assert too_many.value.param == "n"
    holder.count_choices(3)
    holder.enter()
    with pytest.raises(Overloaded) as refused:
        holder.count_choices(2)
    assert refused.value.code == "rate_limit_exceeded"
    with pytest.raises(Overloaded):
        holder.enter()
    holder.leave()
    holder.leave(3)
    assert holder.num_active == 0
