"""The admission queue against a model of it: nobody is lost, nobody is let in twice, everyone's turn comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.errors import InvalidRequest, Overloaded
from proxy.admission.keys import Client, KeyLimits, TokenBucket
from proxy.admission.queue import AdmissionQueue, TicketState


class AdmissionMachine(RuleBasedStateMachine):
    """Random arrivals, ends and cancellations. The model: a list of who waits, in order of arrival."""

    def __init__(self):
        super().__init__()
        self.limit, self.room = 2, 5
        self.queue = AdmissionQueue(self.limit, self.room)
        self.clients = [Client(name) for name in "abc"]
        self.now = 0.0
        self.tickets = []
        self.told, self.displaced = [], []

    def new(self, client, priority, num_choices=1):
        holder = []
        ticket = self.queue.enter(
            client,
            priority,
            self.now,
            lambda: self.told.append(holder[0]),
            lambda: self.displaced.append(holder[0]),
            num_choices,
        )
        holder.append(ticket)
        return ticket

    def num_in_flight(self, client=None):
        running = self.having(TicketState.ADMITTED)
        return sum(ticket.num_choices for ticket in running if client in (None, ticket.client))

    def having(self, state):
        return [ticket for ticket in self.tickets if ticket.state is state]

    @rule(
        client=st.integers(0, 2), priority=st.integers(-1, 1), later=st.floats(0, 3), num_choices=st.integers(1, 3)
    )
    def enter(self, client, priority, later, num_choices):
        self.now += later
        full = self.num_in_flight() >= self.limit
        waiting = self.having(TicketState.WAITING)
        self.displaced.clear()
        lengths = [sum(ticket.client is other for ticket in waiting) for other in self.clients]
        if full and len(waiting) >= self.room:
            givers = [
                (lengths[index], ticket)
                for index, other in enumerate(self.clients)
                for ticket in waiting
                if ticket.client is other and lengths[index] > lengths[client] + 1 and ticket.priority >= priority
            ]
            if not givers:
                with pytest.raises(Overloaded) as refusal:
                    self.new(self.clients[client], priority, num_choices)
                assert (refusal.value.retry_after_s or 0) >= 0
                assert not self.displaced
                return
            ticket = self.new(self.clients[client], priority, num_choices)
            [displaced] = self.displaced
            assert displaced.state is TicketState.LEFT
            longest = max(length for length, _ in givers)
            assert lengths[self.clients.index(displaced.client)] == longest
            own = [one for one in waiting if one.client is displaced.client]
            least_urgent = max(one.priority for one in own)
            assert displaced is [one for one in own if one.priority == least_urgent][-1]
        else:
            ticket = self.new(self.clients[client], priority, num_choices)
            assert not self.displaced
        assert ticket.state is (TicketState.WAITING if full else TicketState.ADMITTED)
        self.tickets.append(ticket)

    @precondition(lambda self: self.having(TicketState.ADMITTED) or self.having(TicketState.WAITING))
    @rule(data=st.data(), later=st.floats(0, 3))
    def leave(self, data, later):
        self.now += later
        waiting = self.having(TicketState.WAITING)
        running = self.having(TicketState.ADMITTED)
        ticket = data.draw(st.sampled_from(running + waiting))
        self.told.clear()
        self.queue.leave(ticket, self.now)
        if ticket in waiting:
            assert not self.told
            return
        running.remove(ticket)
        for admitted in self.told:
            assert sum(one.num_choices for one in running) < self.limit
            assert admitted.priority == min(one.priority for one in waiting)
            level = [one for one in waiting if one.priority == admitted.priority]
            held = {
                one.client: sum(other.num_choices for other in running if other.client is one.client)
                for one in level
            }
            assert held[admitted.client] == min(held.values()), "who has the fewest choices that run is next"
            own = [one for one in level if one.client is admitted.client]
            assert admitted is own[0], "a client's own requests go in the order of arrival"
            waiting.remove(admitted)
            running.append(admitted)
        assert not waiting or sum(one.num_choices for one in running) >= self.limit

    @rule(limit=st.integers(1, 4))
    def resize(self, limit):
        self.limit = limit
        self.queue.resize(limit, self.room, self.now)

    @invariant()
    def the_books_agree(self):
        self.queue.check_integrity()
        assert self.queue.num_in_flight == self.num_in_flight()
        assert self.queue.num_running == len(self.having(TicketState.ADMITTED))
        assert self.queue.num_waiting == len(self.having(TicketState.WAITING))

    def teardown(self):
        while active := self.having(TicketState.ADMITTED):
            self.queue.leave(active[0], self.now)
        assert not self.having(TicketState.WAITING), "everyone's turn comes"
        assert self.queue.num_in_flight == self.queue.num_waiting == 0
        self.queue.check_integrity()


TestAdmission = AdmissionMachine.TestCase


def test_clients_take_turns_however_many_requests_one_has_sent():
    queue = AdmissionQueue(1, 100)
    greedy, modest = Client("greedy"), Client("modest")
    running = queue.enter(greedy, 0, 0.0)
    waiting = [queue.enter(greedy, 0, 0.0) for _ in range(20)] + [queue.enter(modest, 0, 0.0) for _ in range(2)]
    urgent = queue.enter(greedy, -5, 0.0)
    order = []
    for _ in range(6):
        queue.leave(running, 1.0)
        [running] = [ticket for ticket in (urgent, *waiting) if ticket.state is TicketState.ADMITTED]
        order.append("urgent" if running is urgent else running.client.name)
    assert order == ["urgent", "greedy", "modest", "greedy", "modest", "greedy"]


def test_who_has_few_choices_running_waits_for_the_next_place_only():
    queue = AdmissionQueue(4, 100)
    greedy, modest = Client("greedy"), Client("modest")
    running = [queue.enter(greedy, 0, 0.0, num_choices=128)]
    assert running[0].state is TicketState.ADMITTED, "a request may be more choices than there is room for"
    waiting = [queue.enter(greedy, 0, 0.0) for _ in range(9)]
    own = [queue.enter(modest, 0, 0.0) for _ in range(3)]
    queue.leave(running[0], 1.0)
    assert [ticket.state is TicketState.ADMITTED for ticket in own] == [True, True, False]
    queue.leave(waiting[0], 2.0)
    assert own[2].state is TicketState.WAITING, "each has as many as the other now"
    assert sum(ticket.state is TicketState.ADMITTED for ticket in waiting) == 2


def test_a_full_queue_has_room_for_who_has_few_in_it():
    """A greedy client keeps no other out, and those that are as long as each other do not displace each other."""
    queue = AdmissionQueue(1, 8)
    clients = [Client("greedy"), Client("modest"), Client("third")]
    given = []
    queue.enter(clients[0], 0, 0.0)
    for _ in range(8):
        queue.enter(clients[0], 0, 0.0, on_displaced=lambda: given.append("greedy"))
    with pytest.raises(Overloaded):
        queue.enter(clients[0], 0, 0.0)
    for client, most in ((clients[1], 4), (clients[2], 2)):
        for _ in range(most):
            queue.enter(client, 0, 0.0, on_displaced=lambda name=client.name: given.append(name))
        with pytest.raises(Overloaded):
            queue.enter(client, 0, 0.0)
        queue.check_integrity()
    assert given == ["greedy"] * 4 + ["greedy", "modest"]


def test_the_estimated_wait_follows_the_time_that_requests_run():
    queue = AdmissionQueue(2, 10)
    client = Client("a")
    assert queue.estimated_wait_s() == 0
    for _ in range(200):
        queue.leave(queue.enter(client, 0, 0.0), 4.0)
    for _ in range(2):
        queue.enter(client, 0, 0.0)
    assert queue.estimated_wait_s() == pytest.approx(2.0)
    queue.enter(client, 0, 0.0)
    assert queue.estimated_wait_s() == pytest.approx(4.0)


def test_many_priorities_that_come_and_go_take_no_memory():
    queue = AdmissionQueue(1, 10)
    client = Client("a")
    queue.enter(client, 0, 0.0)
    queue.enter(client, -1, 0.0)
    for priority in range(1000):
        queue.leave(queue.enter(client, priority, 0.0), 0.0)
        queue.check_integrity()


@given(
    rate=st.floats(0.1, 100),
    burst=st.integers(1, 20),
    steps=st.lists(st.tuples(st.floats(0, 2), st.floats(0.1, 30)), min_size=1, max_size=60),
)
def test_a_bucket_gives_no_more_than_its_rate_and_its_waits_are_exact(rate, burst, steps):
    bucket = TokenBucket(rate, burst)
    now, taken, largest = 100.0, 0.0, 0.0
    for pause, cost in steps:
        now += pause
        wait = bucket.wait_s(now, cost)
        if wait > 0:
            assert bucket.wait_s(now + wait * 0.99, cost) > 0
            now += wait + 1e-6
            assert bucket.wait_s(now, cost) == 0
        bucket.take(cost)
        taken, largest = taken + cost, max(largest, cost)
        assert taken <= burst + (now - 100.0) * rate + max(0.0, largest - burst) + 1e-3


def test_a_clients_limits_are_told_apart():
    client = Client("a", KeyLimits(requests_per_s=2, max_concurrent=3, tokens_per_min=600))
    client.enter(0.0)
    client.enter(0.0)
    with pytest.raises(Overloaded, match="2 requests per second") as refusal:
        client.enter(0.0)
    assert refusal.value.retry_after_s == pytest.approx(0.5)
    client.enter(0.5)
    with pytest.raises(Overloaded, match="3 requests in progress"):
        client.enter(9.0)
    client.leave()
    client.enter(9.0)
    assert (client.num_active, client.num_refused) == (3, 2)
    client.charge(500, 9.0)
    with pytest.raises(Overloaded, match="600 tokens per minute") as refusal:
        client.charge(200, 9.0)
    assert refusal.value.retry_after_s == pytest.approx(10)
    client.charge(5000, 9.0 + 50)  # more than a minute's: possible once the minute is whole, and paid back later
    with pytest.raises(Overloaded) as refusal:
        client.charge(1, 9.0 + 50)
    assert refusal.value.retry_after_s == pytest.approx((5000 - 600 + 1) / 10)


def test_limits_of_a_key_count_choices():
    client = Client("a", KeyLimits(max_concurrent=4))
    client.enter(0.0)
    with pytest.raises(InvalidRequest, match="4 choices"):
        client.widen(5)
    client.widen(3)
    client.enter(0.0)
    with pytest.raises(Overloaded):
        client.widen(2)
    client.leave()
    with pytest.raises(Overloaded):
        [client.enter(0.0) for _ in range(2)]
    client.leave()
    client.leave(3)
    assert client.num_active == 0


def test_a_key_is_known_to_instances_by_what_says_nothing_of_it():
    assert Client("anonymous").id == ""
    assert len({Client("a").id, Client("b").id}) == 2 and Client("a").id == Client("a").id
    assert "alice" not in Client("alice").id
