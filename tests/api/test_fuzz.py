"""Some hundred of the fuzzer's cases, with the same checks as ``python -m benchmarks.fuzz``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.fuzz import Fuzzer, answer_problem, valid_bodies

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def send(api, case):
    headers = {"content-type": "application/json", **case.headers}
    try:
        async with asyncio.timeout(90):
            async with api.session.post(api.url + case.path, data=case.body, headers=headers) as response:
                return answer_problem(response.status, response.content_type, await response.read())
    except ValueError:  # a header that the client does not send
        return ""


async def test_the_valid_ones_are_answered(api):
    for path, body in valid_bodies():
        async with api.session.post(api.url + path, json=body) as response:
            text = await response.text()
            assert (response.status, answer_problem(200, response.content_type, text.encode())) == (200, ""), text


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_is_answered_in_order(api, seed):
    fuzzer = Fuzzer(seed)
    cases = [fuzzer.case() for _ in range(100)]
    limit = asyncio.Semaphore(4)

    async def one(case):
        async with limit:
            return await send(api, case)

    problems = await asyncio.gather(*(one(case) for case in cases))
    wrong = [(problem, case) for problem, case in zip(problems, cases, strict=True) if problem]
    assert not wrong, f"{len(wrong)}: {wrong[0]}"
    await api.settle()
