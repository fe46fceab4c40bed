"""Some hundred broken requests and frames: no 5xx, no hang, an error that says something, nothing held."""

import random
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from benchmarks.broken import broken_request, find_problem, is_answered, send_frames, valid_bodies
from epd_serve.verify.client import Client
from epd_serve.verify.traffic import in_parallel

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(api):
    made = Client(api.url)
    await made.meet()
    yield made
    await made.close()


async def test_the_valid_ones_are_answered(client):
    assert all([await is_answered(client, path, body) for path, body in valid_bodies(client.model)])


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
async def test_whatever_comes_is_answered_in_order(api, client, seed):
    rng, problems = random.Random(seed), []
    valid = valid_bodies(client.model)

    async def send(request):
        if problem := await find_problem(client, *request):
            problems.append((problem, request))

    await in_parallel(send, (broken_request(rng, valid) for _ in range(100)), 4)
    assert not problems, f"{len(problems)}: {problems[0]}"
    await api.settle()


async def test_broken_frames_disturb_nobody(api, client):
    rng = random.Random(0)
    ports = [urlsplit(instance.url).port for instance in api.instances.values()]

    async def send(number):
        await send_frames("instance", "127.0.0.1", ports[number % len(ports)], rng)

    await in_parallel(send, iter(range(400)), 4)
    await api.settle()
    assert all([await is_answered(client, path, body) for path, body in valid_bodies(client.model)[:3]])
