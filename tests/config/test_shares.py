"""Shares of a device: what is given to whom, and what is refused."""

from pathlib import Path

import pytest

from epd_serve.config import parse_config
from epd_serve.config.load import load_config
from epd_serve.config.shares import DeviceShare
from epd_serve.cost.interference import InterferenceMatrix, Workload


def shares(text: str, matrix: InterferenceMatrix | None = None) -> dict[str, tuple[float, float]]:
    chosen = parse_config(text).device_shares(matrix)
    return {name: (round(share.share, 4), round(share.start, 4)) for name, share in chosen.items()}


def test_without_a_wish_there_are_no_limits() -> None:
    assert shares("topology: (E-P)-D") == {}


def test_numbers_stand_and_the_rest_goes_to_the_others_in_the_group_alone() -> None:
    assert shares("topology: (E-PD)\nroles: {E: {share: 0.3}}") == {"e0": (0.3, 0.0), "pd0": (0.7, 0.3)}
    assert shares("topology: (2E-P)-D\nroles: {E: {share: 0.25}}") == {
        "e0": (0.25, 0.0),
        "e1": (0.25, 0.25),
        "p0": (0.5, 0.5),
    }
    assert shares("topology: 2(E-D)-P\ninstances: {share: auto}\nroles: {P: {share: 1}}") == {
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
            r"sum to 1\.2 \(e0 0\.7, d0 0\.5\); together they are 1 at most",
        ),
        ("roles: {E: {share: 1}}", r"\(e0 1\) leave nothing to d0; lower them"),
        ("roles: {E: {share: 1.5}}", "share"),
        ("roles: {E: {share: most}}", "share"),
        ("roles: {E: {share: true}}", "no switch"),
        ("roles: {E: {share: 0}}", "share"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(f"topology: (E-D)-P\n{text}")


def test_auto_goes_by_what_was_measured() -> None:
    def matrix(increase: float, name: str = "D") -> InterferenceMatrix:
        return InterferenceMatrix(
            device="cpu",
            description="a processor",
            isolation="process",
            dtype="float32",
            threads=1,
            seconds=1.0,
            workloads=[
                Workload(name="E", kind="stage", demand="compute", alone_s=0.1, alone_spread=0.0),
                Workload(name=name, kind="stage", demand="bandwidth", alone_s=0.1, alone_spread=0.0),
            ],
            increase=[[0.9, 0.1], [increase, 0.9]],
        )

    halves = {"e0": (0.5, 0.0), "d0": (0.5, 0.5)}
    text = "topology: (E-D)-P\nroles: {E: {share: auto}}"
    assert shares(text) == halves, "nothing is known"
    assert shares(text, matrix(0.15)) == {}, "each slows the other by little"
    assert shares(text, matrix(0.25)) == halves
    assert shares(text, matrix(0.1, "P")) == halves, "the pair was not measured"
    fixed = "topology: (E-D)-P\nroles: {E: {share: 0.25}, D: {share: auto}}"
    assert shares(fixed, matrix(0.15)) == {"e0": (0.25, 0.0), "d0": (0.75, 0.25)}


def test_the_file_of_the_matrix_is_relative_to_the_deployment(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("interference: measured/cpu.json")
    assert load_config(tmp_path / "d.yaml").interference == tmp_path / "measured" / "cpu.json"


def test_a_share_and_the_limit_of_decodes_reach_the_instance() -> None:
    config = parse_config("topology: (E-D)-P\nslo: {tpot_ms: 40}")
    options = config.options_for(
        config.placement()[1],
        device="cpu",
        port=9001,
        threads=1,
        share=DeviceShare(share=0.5, start=0.25),
        device_board="/tmp/board:1",
    )
    assert (options.device_share, options.slo.tpot_ms) == (DeviceShare(share=0.5, start=0.25), 40)
    assert options.device_board == "/tmp/board:1"
