"""Shares of a device: what is given to whom, and what is refused."""

import pytest

from epd_serve.config import parse_config


def shares(text: str) -> dict[str, tuple[float, float]]:
    chosen = parse_config(text).device_shares()
    return {name: (round(share.share, 4), round(share.start, 4)) for name, share in chosen.items()}


def test_numbers_stand_and_the_rest_goes_to_the_others_in_the_group_alone() -> None:
    assert shares("topology: (E-PD)\nroles: {E: {share: 0.3}}") == {"e0": (0.3, 0.0), "pd0": (0.7, 0.3)}
    assert shares("topology: (2E-P)-D\nroles: {E: {share: 0.25}}") == {
        "e0": (0.25, 0.0),
        "e1": (0.25, 0.25),
        "p0": (0.5, 0.5),
    }
    assert shares("topology: 2(E-D)-P\ninstances: {share: 0.5}\nroles: {P: {share: 1}}") == {
        "e0": (0.5, 0.0),
        "d0": (0.5, 0.5),
        "e1": (0.5, 0.0),
        "d1": (0.5, 0.5),
        "p0": (1.0, 0.0),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "roles: {E: {share: 0.7}, D: {share: 0.5}}",
            r"share: e0 0\.7, d0 0\.5 of cpu sum to 1\.2; the sum must be at most 1",
        ),
        ("roles: {E: {share: 1}}", "share: e0 1 of cpu leave nothing to d0; lower them"),
        ("roles: {E: {share: 1.5}}", "share"),
        ("roles: {E: {share: 0}}", "share"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(f"topology: (E-D)-P\n{text}")


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("P: {memory_share: 0.7}, D: {memory_share: 0.5}", r"p0 0\.7, d0 0\.5 of cuda:0 sum to 1\.2"),
        ("P: {memory_share: 0.9}", r"p0 0\.9 of cuda:0 leave nothing to d0"),
    ],
)
def test_parts_of_the_memory_that_do_not_fit_are_refused(roles: str, message: str) -> None:
    config = parse_config(f"topology: (P-D)\ndevices: [cuda:0]\nroles: {{{roles}}}")
    with pytest.raises(ValueError, match=message):
        config.memory_shares(config.placement())
