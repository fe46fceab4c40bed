"""Reports as callers of an instance get them, over a real socket."""

import contextlib
from types import SimpleNamespace

import pytest
import uvicorn
from servers import served

from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.engine.telemetry import StageRates
from epd_serve.errors import Unavailable
from epd_serve.instance.calls import INTERVAL_S, ControlCalls, LookApp, Reports
from epd_serve.protocol.instance_state import Load
from epd_serve.rpc.server import LinkService
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.types import SamplingParams, Stage


class Instance:
    """Reports ``num_running`` sequences."""

    def __init__(self, interval_s=INTERVAL_S):
        self.is_accepting, self.is_loading = True, False
        self.lifecycle = SimpleNamespace(epoch=0)
        self.reports = Reports(self, interval_s)

    def load(self):
        return Load(num_running=3)

    def check_started(self):
        if self.is_loading:
            raise Unavailable("the instance is loading its model")


@contextlib.asynccontextmanager
async def listening(instance):
    """An iterator over an instance's reports."""
    service = LinkService(calls=ControlCalls(instance).handlers())
    config = uvicorn.Config(LookApp(service), port=0, lifespan="off", log_config=None, http=service.protocol)
    async with (
        served(uvicorn.Server(config)) as url,
        NativeConnections() as connections,
        contextlib.aclosing(NativeInstance(connections, "p0", url).reports()) as reports,
    ):
        yield reports


async def test_calls_and_features_are_named_once_to_each_caller():
    instance = Instance(interval_s=0.02)
    for number in range(700):
        instance.reports.add_feature(f"old {number}")
    async with listening(instance) as one:
        first = await anext(one)
        assert (first.received, first.encoded) == ([], [f"old {number}" for number in range(700)])
        for number in range(10):
            instance.reports.add_call(Stage.PREFILL, f"r{number}")
        instance.reports.add_feature("new")
        instance.reports.add_feature("old 2")
        names = [f"Pr{number}" for number in range(10)]
        while not (report := await anext(one)).received:
            pass
        assert (report.received, report.encoded) == (names, ["new", "old 2"])
        instance.reports.drop_feature("old 3")
        async with listening(instance) as other:
            report = await anext(other)
            assert report.received == names and "old 3" not in report.encoded
        report = await anext(one)
        assert report.received == report.encoded == []


async def test_a_change_of_state_is_reported_at_once_and_the_end_last():
    instance = Instance(interval_s=60)
    async with listening(instance) as reports:
        report = await anext(reports)
        assert (report.ready, report.load.num_running, report.epoch) == (True, 3, 0)
        instance.is_accepting, instance.lifecycle.epoch = False, 1
        instance.reports.send_now()
        report = await anext(reports)
        assert (report.ready, report.epoch) == (False, 1)
        instance.is_accepting = True
        instance.reports.close()
        assert not (await anext(reports)).ready
        with pytest.raises(StopAsyncIteration):
            await anext(reports)


async def test_an_instance_that_loads_reports_nothing():
    instance = Instance()
    instance.is_loading = True
    async with listening(instance) as reports:
        with pytest.raises(Unavailable, match="loading"):
            await anext(reports)


def sequence(*output, state=SequenceState.RUNNING):
    made = Sequence(
        request_id="r", prompt_ids=[1], sampling=SamplingParams(seed=0), max_tokens=9, positions=None, state=state
    )
    made.output_ids += output
    return made


def test_rates_are_what_steps_and_encodes_took():
    now = 0.0
    rates = StageRates(lambda: now)
    # a prompt of one token takes a whole step: as a rate, that would keep prompts away from an idle instance
    rates.stepped(ScheduleOutput(decodes=[], prefills=[(sequence(), 1)]), 0.026)
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


def test_lengths_of_answers_and_prompts():
    rates = StageRates(lambda: 0.0)
    ended = sequence(1, 2, 3, state=SequenceState.FINISHED)
    rates.stepped(ScheduleOutput(decodes=[ended, sequence(1)], prefills=[]), 0.1)
    assert rates.mean_output_tokens == 3
    rates.prompted(0, 5)
    assert rates.tokens_per_character == 0
    rates.prompted(100, 30)
    assert rates.tokens_per_character == pytest.approx(0.3)
