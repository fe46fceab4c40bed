"""The sender's thread: whatever one transfer meets, the next one goes out and every fence is passed."""

import threading
import time
from collections.abc import Sequence

import pytest

from epd_serve.protocol.wire import ReserveReply
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.transfer.transport import Piece


class Source:
    """One byte per block. Block 13 cannot be read, as on an accelerator whose copy fails."""

    def pieces(
        self, layers: range, local: Sequence[int], remote: Sequence[int], remote_num_blocks: int
    ) -> list[Piece]:
        if 13 in local:
            raise RuntimeError("out of memory")
        return [(there, memoryview(bytes([here]))) for here, there in zip(local, remote, strict=True)]


def passed(sender: KVSender, transfer: OutgoingTransfer) -> bool:
    event = threading.Event()
    sender.fence(transfer, lambda _: event.set())
    return event.wait(5)


@pytest.mark.parametrize(
    ("blocks", "lifetime_s", "message"), [([13], 60.0, "out of memory"), ([7], -1.0, "lease of transfer")]
)
def test_a_transfer_that_fails_takes_no_other_along(blocks: list[int], lifetime_s: float, message: str) -> None:
    transport = EmbeddedTransport(path="shm")
    slab = transport.allocate("kv", 8)
    sender = KVSender(transport, Source(), GroupSizer(num_layers=1), time.monotonic)
    target = ReserveReply(block_ids=[2], num_cached_blocks=0, region=slab.region, num_blocks=8)
    failing = OutgoingTransfer("failing", target, time.monotonic() + lifetime_s)
    fine = OutgoingTransfer("fine", target, time.monotonic() + 60)
    sender.push(failing, range(1), blocks, [3], lambda: None)
    sender.push(failing, range(1), [8], [4], lambda: None)
    sender.push(fine, range(1), [9], [2], lambda: None)
    assert passed(sender, failing)
    assert passed(sender, fine)
    assert message in str(failing.error)
    assert fine.error is None
    assert bytes(slab.buffer) == bytes([0, 0, 9, 0, 0, 0, 0, 0]), "a failed transfer writes nothing more"
    sender.close()
    transport.close()
