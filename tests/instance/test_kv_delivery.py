"""The prefill side of the hand-off of KV: who is to blame, and who is waited for."""

from __future__ import annotations

import asyncio

import pytest
from hand_off import REGION, Peers, TenBlocks, handoff, transfers

from epd_serve.errors import DECODE_DRAINING, PEER_UNREACHABLE, InstanceFailed, Unavailable
from epd_serve.instance.calls import CleanUps, Refusals
from epd_serve.instance.kv_delivery import KVDelivery
from epd_serve.instance.telemetry import InstanceTelemetry
from epd_serve.protocol import wire
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.transport import PeerGone, TransferError
from epd_serve.types import SamplingParams

LEASE_S = 0.3
GRANTED = wire.encode(wire.ReserveReply(block_ids=[1, 2, 3], num_cached_blocks=1, name="d0"))


def delivery(peers: Peers) -> KVDelivery:
    sequence = Sequence(
        request_id="r",
        prompt_ids=[1] * 9,
        sampling=SamplingParams(seed=0),
        max_tokens=3,
        positions=None,
        blocks=[5, 6, 7],
    )
    own = transfers(
        peers, engine=TenBlocks(), clean_ups=CleanUps(), telemetry=InstanceTelemetry("p0"), lease_s=LEASE_S
    )
    return KVDelivery(own, sequence, "http://d")


async def handed_over(working: KVDelivery) -> None:
    try:
        await working.open()
        await working.hand_over(handoff())
    finally:
        working.give_up("")


async def test_what_was_given_up_before_it_was_read_is_not_handed_over() -> None:
    peers = Peers(reserve=GRANTED)
    working = delivery(peers)
    working.transfer.cancelled = True  # its blocks here may be another's
    with pytest.raises(InstanceFailed):
        await handed_over(working)
    assert "/kv/complete" not in peers.calls


@pytest.mark.parametrize(("code", "kind"), [(PEER_UNREACHABLE, PeerGone), (None, TransferError)])
async def test_an_announcement_that_fails_says_whether_the_other_can_be_reached(
    code: str | None, kind: type[TransferError]
) -> None:
    working = delivery(Peers(reserve=GRANTED, announce=InstanceFailed("no", code=code)))
    await working.open()
    announcement = wire.KVAnnouncement(REGION, 0, 1, [wire.SentKV("t", [2], [(52, 1)])])
    with pytest.raises(TransferError) as failed:
        await asyncio.to_thread(working.transfer.peer.announce, announcement)
    assert type(failed.value) is kind
    working.give_up("")


async def test_a_reader_that_leaves_its_role_is_told_from_the_prefill_instance() -> None:
    with pytest.raises(InstanceFailed) as refused:
        await handed_over(delivery(Peers(reserve=Refusals("d0").error())))
    assert refused.value.code == DECODE_DRAINING


async def test_a_reader_that_waits_for_blocks_is_waited_for_and_one_that_is_gone_is_not() -> None:
    async def for_ever() -> bytes:
        await asyncio.Event().wait()
        return b""

    peers = Peers(reserve=for_ever, renew=Unavailable("nothing to renew, but it answers"))
    working = asyncio.create_task(handed_over(delivery(peers)))
    await asyncio.sleep(3 * LEASE_S)
    assert not working.done()
    peers.answers["/kv/renew"] = InstanceFailed("no answer")
    with pytest.raises(InstanceFailed) as failed:
        await asyncio.wait_for(working, 300)
    assert failed.value.code == PEER_UNREACHABLE
