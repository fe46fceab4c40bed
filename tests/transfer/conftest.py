"""One mooncake_master and three clients of it for all tests of the store."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest
from blake3 import blake3
from mooncake_instances import Instances
from mooncake_master import Master, put_and_wait


@pytest.fixture(scope="package")
def master() -> Iterator[Master]:
    master = Master()
    yield master
    master.kill()


@pytest.fixture(scope="package")
def all_instances(master: Master) -> Iterator[Instances]:
    instances = Instances(master)
    yield instances
    instances.close()


@pytest.fixture
def instances(all_instances: Instances) -> Iterator[Instances]:
    all_instances.started = []
    yield all_instances
    for store in all_instances.started:
        store.check_integrity()
        assert store.num_owners == 0


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """An mm_hash of this test alone."""
    return blake3(request.node.name.encode()).hexdigest()


@pytest.fixture
def elsewhere(master: Master, key: str) -> Iterator[multiprocessing.process.BaseProcess]:
    """An encoder in a process of its own, which has put b"feature"."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=put_and_wait, args=(master.address, key, b"feature", theirs), daemon=True)
    process.start()
    assert ours.recv() == "stored"
    yield process
    process.kill()
    process.join()
