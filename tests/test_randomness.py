"""No two callers get the same random bytes, whatever thread or process they run in."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from epd_serve.telemetry.span import random_block


def test_blocks_are_never_the_same():
    def take(_: int) -> list[bytes]:
        return [random_block() for _ in range(5000)]

    with ThreadPoolExecutor(8) as pool:
        blocks = [block for many in pool.map(take, range(8)) for block in many]
    assert len(set(blocks)) == len(blocks) == 40_000
    assert {len(block) for block in blocks} == {16}


def test_a_forked_process_has_its_own():
    random_block()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, random_block())
        os._exit(0)
    os.waitpid(pid, 0)
    theirs = os.read(reader, 16)
    assert len(theirs) == 16 and theirs not in {random_block() for _ in range(2000)}
    os.close(reader)
    os.close(writer)
