"""A shaped link takes the time that its arithmetic says, for everyone that uses it, and changes nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from device.emulated.timeline import Faults
from epd_serve.protocol.wire import Region
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.shaped import ShapedTransport
from epd_serve.transfer.transport import Piece, TransferError

REGION = Region(name="a", nbytes=1 << 30, host_id="h", pid=1, fd=1, host="", port=0)


class Instant:
    """Moves nothing, in no time."""

    allocate = register = release = close = None

    def read(self, region: Region, pieces: Sequence[Piece]) -> None: ...


def pieces(nbytes: int) -> list[Piece]:
    return [(0, memoryview(bytes(nbytes)))] if nbytes else []


@given(
    transfers=st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 0.1)), min_size=1, max_size=20),
    latency_s=st.floats(0, 0.01),
)
def test_transfers_one_after_the_other(transfers: list[tuple[int, float]], latency_s: float) -> None:
    clock = Clock(0.0)
    link = ShapedTransport(Instant(), 1000.0, latency_s, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    for nbytes, pause_s in transfers:
        clock.now += pause_s
        start = clock.now
        link.read(REGION, pieces(nbytes))
        assert clock.now - start == pytest.approx(latency_s + nbytes / 1000)


def test_a_transfer_takes_the_time_of_the_bytes_it_stands_for_and_slower_on_a_slow_link(tmp_path: Path) -> None:
    clock, faults = Clock(0.0), tmp_path / "faults.json"
    link = ShapedTransport(
        EmbeddedTransport(path="shm"),
        1000.0,
        0.01,
        scales={"kv": 10.0},
        faults=Faults(faults),
        clock=clock,
        sleep=clock.sleep,
    )
    slabs = [link.allocate(name, 100) for name in ("kv", "features")]
    for slab in slabs:
        slab.buffer[:] = b"x" * 100
    for region, slow, seconds in (
        (slabs[0].region, 1.0, 0.01 + 1.0),
        (slabs[1].region, 1.0, 0.01 + 0.1),
        (slabs[0].region, 3.0, 0.03 + 3.0),
    ):
        faults.write_text(f'{{"links": {{"slowness": {slow}}}}}')
        start, data = clock.now, bytearray(100)
        link.read(region, [(0, memoryview(data))])
        assert clock.now - start == pytest.approx(seconds)
        assert data == b"x" * 100
    with pytest.raises(TransferError):
        link.read(slabs[0].region, [(60, memoryview(bytearray(50)))])
    link.close()
