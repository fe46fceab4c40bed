"""Reports as callers of an instance get them, over a real socket."""

import contextlib

import pytest
import uvicorn
from servers import served

from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.errors import InstanceLost, InvalidRequest, Unavailable
from epd_serve.instance.http import LookApp, link_service
from epd_serve.instance.rates import StageRates
from epd_serve.instance.reports import INTERVAL_S, Reporter
from epd_serve.protocol.instance_state import Load
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.types import SamplingParams, Stage


@contextlib.asynccontextmanager
async def serving(routes):
    """URL of an instance with these routes."""
    service = link_service(routes)
    config = uvicorn.Config(LookApp(service), port=0, lifespan="off", log_config=None, http=service.protocol)
    async with served(uvicorn.Server(config)) as url:
        yield url


@contextlib.asynccontextmanager
async def listening(reporter):
    """An iterator over an instance's reports."""
    async with (
        serving(reporter.routes()) as url,
        NativeConnections() as connections,
        contextlib.aclosing(NativeInstance(connections, "p0", url).reports()) as reports,
    ):
        yield reports


def ready():
    pass


async def test_an_idle_instance_reports_five_times_a_second():
    num_reports = 0
    async with listening(Reporter(lambda: Load(num_running=3), ready)) as reports:
        async for report in reports:
            assert report.ready
            assert report.load.num_running == 3
            num_reports += 1
            if num_reports == 6:
                break
    assert INTERVAL_S < 0.2


async def test_calls_are_named_once_to_each_caller() -> None:
    reporter = Reporter(Load, ready, interval_s=0.02)
    async with listening(reporter) as one:
        assert (await anext(one)).received == []
        for number in range(10):
            reporter.add_call(Stage.PREFILL, f"r{number}")
        names = [f"Pr{number}" for number in range(10)]
        while not (received := (await anext(one)).received):
            pass
        assert received == names
        async with listening(reporter) as other:
            assert (await anext(other)).received == names
        assert (await anext(one)).received == []


async def test_features_are_named_once_and_the_latest_to_who_comes_later() -> None:
    reporter = Reporter(Load, ready, interval_s=0.02)
    for number in range(700):
        reporter.add_feature(f"old {number}")
    async with listening(reporter) as reports:
        assert (await anext(reports)).encoded == [f"old {number}" for number in range(700)]
        reporter.add_feature("new")
        reporter.add_feature("old 2")
        while not (encoded := (await anext(reports)).encoded):
            pass
        assert encoded == ["new", "old 2"]
    reporter.drop_feature("old 3")
    async with listening(reporter) as reports:
        assert "old 3" not in (await anext(reports)).encoded


async def test_a_change_of_state_is_reported_at_once() -> None:
    reporter = Reporter(Load, ready, interval_s=60)
    async with listening(reporter) as reports:
        assert (await anext(reports)).epoch == 0
        reporter.state_changed(False, 1)
        report = await anext(reports)
        assert (report.ready, report.epoch) == (False, 1)


async def test_an_instance_that_stops_says_so_and_ends_its_reports():
    reporter = Reporter(Load, ready, interval_s=60)
    async with listening(reporter) as reports:
        assert (await anext(reports)).ready
        reporter.close()
        assert not (await anext(reports)).ready
        with pytest.raises(StopAsyncIteration):
            await anext(reports)


async def test_errors_of_reports():
    def loading():
        raise Unavailable("the instance is loading its model")

    async with listening(Reporter(Load, loading)) as reports:
        with pytest.raises(Unavailable, match="loading"):
            await anext(reports)
    async with serving([]) as url, NativeConnections() as connections:
        with pytest.raises(InvalidRequest, match="no /reports"):
            await anext(NativeInstance(connections, "p0", url).reports())
    with pytest.raises(InstanceLost):
        async with NativeConnections() as connections:
            await anext(NativeInstance(connections, "p0", url).reports())


def sequence(*output, state=SequenceState.RUNNING):
    made = Sequence(
        request_id="r", prompt_ids=[1], sampling=SamplingParams(seed=0), max_tokens=9, positions=None, state=state
    )
    made.output_ids += output
    return made


def test_rates_are_what_steps_and_encodes_took():
    now = 0.0
    rates = StageRates(lambda: now)
    assert rates.report() == {}
    for count in (1, 2, 4, 8) * 3:
        rates.stepped(ScheduleOutput(decodes=[sequence()] * count, prefills=[]), 0.01 + 0.001 * count)
        rates.stepped(ScheduleOutput(decodes=[sequence()] * 4, prefills=[(sequence(), 100 * count)]), 0.1 * count)
        rates.encoded(count * 1000, 0.5 * count)
    report = rates.report()
    assert report["D"].seconds(4) == pytest.approx(0.014, rel=0.05)
    assert report["P"].seconds(400) == pytest.approx(0.396, rel=0.05), "what the decodes took is not the prompt's"
    assert report["E"].seconds(2000) == pytest.approx(1.0, rel=0.05)
    assert report["E"].is_fresh
    now = 100.0
    assert not rates.report()["E"].is_fresh


def test_a_probe_says_nothing_of_the_rate_of_prompts():
    """A prompt of one token takes a whole step: as a rate, that would keep prompts away from an idle instance."""
    rates = StageRates(lambda: 0.0)
    for _ in range(5):
        rates.stepped(ScheduleOutput(decodes=[], prefills=[(sequence(), 1)]), 0.026)
    assert rates.report() == {}
    rates.stepped(ScheduleOutput(decodes=[], prefills=[(sequence(), 256)]), 0.026)
    assert rates.report()["P"].seconds(256) == pytest.approx(0.026)


def test_lengths_of_answers_and_prompts():
    rates = StageRates(lambda: 0.0)
    ended = sequence(1, 2, 3, state=SequenceState.FINISHED)
    rates.stepped(ScheduleOutput(decodes=[ended, sequence(1)], prefills=[]), 0.1)
    assert rates.mean_output_tokens == 3
    rates.prompted(0, 5)
    assert rates.tokens_per_character == 0
    rates.prompted(100, 30)
    assert rates.tokens_per_character == pytest.approx(0.3)
