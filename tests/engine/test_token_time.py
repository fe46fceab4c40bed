"""The guard of decodes, on a model device: the time per token stays at the limit, and encodes never starve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.engine.device_board import MIN_SHARE, Slack, pause_s


def simulate(alone_s, slowdown, limit_s, piece_s, seconds):
    """(mean time per token, share of the time that encodes ran) of decodes beside an encode that never ends."""
    account = Slack(limit_s=limit_s)
    now, token_s, encoded_s, tokens, encoding_s = 0.0, 0.0, 0.0, 0, 0.0
    wait_s, left_s, paused_s = 0.0, piece_s, 0.0  # the encode runs while nothing is to wait for
    progress, tick = 0.0, min(piece_s, alone_s) / 16
    while now < seconds:
        now += tick
        token_s += tick
        if wait_s > 0:
            wait_s, paused_s = wait_s - tick, paused_s + tick
        else:
            left_s, encoded_s, encoding_s = left_s - tick, encoded_s + tick, encoding_s + tick
        progress += tick / (alone_s if wait_s > 0 else alone_s * slowdown)
        if progress >= 1:
            account = account.after(token_s, encoded_s)
            tokens, progress, token_s, encoded_s = tokens + 1, 0.0, 0.0, 0.0
        if (wait_s <= 0 and left_s <= 0) or paused_s:
            wait_s = wait_s if wait_s > 0 else pause_s(account, piece_s=piece_s, paused_s=paused_s)
            if wait_s <= 0:
                left_s, paused_s = piece_s, 0.0
    return now / tokens, encoding_s / now


@pytest.mark.parametrize("slowdown", [1.05, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("piece", [0.2, 1.0, 2.0])
def test_the_mean_time_per_token_stays_at_the_limit(slowdown, piece):
    alone = 0.02
    mean, share = simulate(alone, slowdown, 1.2 * alone, piece * alone, 20)
    assert mean <= 1.2 * alone * 1.03
    assert share > MIN_SHARE
    if slowdown <= 1.2:
        assert share > 0.95, "there is nothing to slow down for"


def test_encodes_keep_their_least_share_where_decodes_are_over_the_limit_alone():
    mean, share = simulate(0.02, 2.0, 0.01, 0.01, 20)
    assert 0.8 * MIN_SHARE <= share <= 1.6 * MIN_SHARE
    assert mean == pytest.approx(0.02 * (1 + share / 2), rel=0.1)


def test_without_decodes_an_encode_never_waits():
    assert pause_s(None, piece_s=5.0, paused_s=0.0) == 0.0


@given(credit=st.floats(-1, 1), beside=st.floats(0, 1), piece=st.floats(1e-4, 2), limit=st.floats(1e-3, 0.5))
def test_every_pause_ends(credit, beside, piece, limit):
    """However little decodes leave, an encode goes on after at most so long that it keeps its least share."""
    slack = Slack(credit_s=credit, limit_s=limit, beside_s=beside)
    paused, asked = 0.0, 0
    while (wait := pause_s(slack, piece_s=piece, paused_s=paused)) > 0:
        assert wait <= limit / 2
        paused, asked = paused + wait, asked + 1
        assert asked <= piece / MIN_SHARE / limit * 2 + 2
    assert paused <= piece / MIN_SHARE + 1e-9


def test_the_account_knows_steps_beside_an_encode_from_steps_alone():
    account = Slack(limit_s=0.03)
    for _ in range(100):
        account = account.after(0.02, 0.0)
        account = account.after(0.05, 0.05)
        account = account.after(0.9, 0.2)  # neither
    assert account.alone_s == pytest.approx(0.02)
    assert account.beside_s == pytest.approx(0.05)
    assert account.cost_s(0.05) == pytest.approx(0.02)
    assert account.credit_s == pytest.approx(-4 * 0.03), "what was long before is forgotten"
