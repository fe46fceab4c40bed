"""Another role for an instance, ordered at the gateway: what may be, and what the table learns of it."""

import asyncio

import pytest
from gateway_settings import admin_plane

from epd_serve.protocol import wire
from epd_serve.protocol.instance_state import Load, Report, RoleChanged

KEY = {"authorization": "Bearer secret"}


@pytest.fixture
async def gateway(start):
    return await start("p0:P", "p1:P", "d0:D", reporting=True, admin=admin_plane())


async def ordered(gateway, name, **body):
    url = f"{gateway.app.state.admin_url}/instances/{name}/role"
    async with gateway.session.post(url, json=body, headers=KEY) as response:
        return response.status, await response.json()


async def test_orders_that_cannot_be_are_refused_by_name(gateway):
    for name, body, status, message in (
        ("x9", {"role": "D"}, 404, "known: p0, p1, d0"),
        ("p0", {"role": "Q"}, 400, "not a stage"),
        ("p0", {}, 400, "role"),
        ("p0", {"role": "D", "deadline_s": -1}, 400, "deadline_s"),
        ("d0", {"role": "P"}, 409, "the only ready one for stage D"),
    ):
        answer = await ordered(gateway, name, **body)
        assert answer[0] == status and message in answer[1]["error"]["message"], answer
    assert all(not record.drains for record in gateway.table)


async def test_a_new_epoch_is_asked_about_before_it_gets_work(gateway):
    p1 = gateway["p1"]
    p1.report = lambda: Report(load=Load(), ready=False)
    await gateway.until(lambda: not gateway.table["p1"].ready)
    p1.role = "D"
    p1.info = {"epoch": 1}
    p1.report = lambda: Report(load=Load(), ready=True, epoch=1)
    await gateway.until(lambda: gateway.table["p1"].ready)
    assert str(gateway.table["p1"].role) == "D" and gateway.table["p1"].info.epoch == 1


async def test_instances_and_dashboard_show_the_layout_in_fact(start):
    gateway = await start(
        "p0:P", "d0:D", "p1:P", "e0:E", reporting=True, admin=admin_plane(), topology="(P-D)-P-E"
    )

    async def shown():
        lines = []
        for url in (f"{gateway.app.state.admin_url}/instances", f"{gateway.url}/dashboard/data"):
            async with gateway.session.get(url) as response:
                lines.append((await response.json())["topology"])
        return lines

    assert await shown() == ["(P-D)-P-E"] * 2
    p1 = gateway["p1"]
    p1.role, p1.info = "D", {"epoch": 1}
    p1.report = lambda: Report(load=Load(), ready=True, epoch=1)
    await gateway.until(lambda: str(gateway.table["p1"].role) == "D")
    assert await shown() == ["E-P-2D"] * 2
    gateway.become([("d7", gateway["d0"].url), ("p7", gateway["p0"].url)])
    await gateway.until(lambda: all(one.ready for one in gateway.table))
    assert await shown() == ["P-D"] * 2


@pytest.mark.parametrize("first", ["p0", "d0"])
async def test_d_leaving_during_ps_reservation_is_the_reported_cause(start, kit, first):
    """P alone serves its stage: blamed for what D has done, it would leave the request nowhere to go."""
    gateway = await start("p0:P", "d0:D", "d1:D", reporting=True)

    def ask(message):
        if message.decode_url == gateway["d0"].url:
            ended = kit.fail(503, f"request {message.request_id} was cancelled", code="request_ended")
            return [0.0 if first == "p0" else 0.2, *ended]
        return [kit.DECODE]

    left = kit.fail(503, "instance d0 is leaving its role", code="draining")
    gateway["p0"].scripts["/stage/prefill"] = ask
    gateway["d0"].scripts["/stage/decode"] = lambda _: [0.2 if first == "p0" else 0.0, *left]
    answers = await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(6)))
    assert answers == [(200, kit.WHOLE)] * 6
    assert gateway["d0"].got("/stage/decode"), "it was never asked"
    assert gateway.table["p0"].state == "up"


def held_back(gateway, name):
    """Lets the order for an instance take until the event is set."""
    go_on, came = asyncio.Event(), []
    changed = wire.encode(RoleChanged("P", "D", 0.1))

    def carry_out(message):
        came.append(message.role)
        return [go_on.wait, (200, {}), changed]

    gateway[name].scripts["/role"] = carry_out
    return go_on, came


async def test_an_operators_drain_survives_a_switch(gateway):
    go_on, came = held_back(gateway, "p1")
    record, admin = gateway.table["p1"], f"{gateway.app.state.admin_url}/admin/instances/p1"
    ordering = asyncio.create_task(ordered(gateway, "p1", role="D"))
    await gateway.until(lambda: bool(came))
    for call in ("undrain", "drain"):
        async with gateway.session.post(f"{admin}/{call}") as answer:
            said = await answer.json()
        assert answer.status == 200 and said["draining"], "it changes its role"
        assert record.drains
    go_on.set()
    assert (await ordering)[0] == 200
    assert record.drains
    async with gateway.session.post(f"{admin}/undrain") as answer:
        assert not (await answer.json())["draining"]
    assert not record.drains


async def test_an_instance_may_leave_while_it_changes_its_role(start):
    gateway = await start("p0:P", "d0:D", "late:P", reporting=True, admin=admin_plane(key="secret"))
    own = [(name, gateway[name].url) for name in ("p0", "d0")]
    gateway.become(own)
    admin, url = gateway.app.state.admin_url, gateway["late"].url
    for asked in (False, True):  # it is gone when the order ends, or when it has been asked what it is now
        go_on, came = held_back(gateway, "late")
        joining = {"name": "late", "url": url}
        async with gateway.session.post(f"{admin}/instances", json=joining, headers=KEY) as answer:
            assert answer.status == 201
        await gateway.until(lambda: gateway.table["late"].ready)
        ordering = asyncio.create_task(ordered(gateway, "late", role="D"))
        await gateway.until(lambda came=came: bool(came))
        if asked:
            gateway["late"].hangs, before = True, gateway["late"].num_asked
            go_on.set()
            await gateway.until(lambda before=before: gateway["late"].num_asked > before)
        async with gateway.session.delete(f"{admin}/instances/late", headers=KEY) as answer:
            assert answer.status == 200
        gateway["late"].hangs = False
        go_on.set()
        status, said = await ordering
        assert (status, said["instance"], said["to"]) == (200, "late", "D")
        assert gateway.table.get("late") is None
    assert not gateway.table["p0"].drains
