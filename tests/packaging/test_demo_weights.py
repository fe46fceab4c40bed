"""The demo model in the package."""

from __future__ import annotations

from epd_serve.demo import weights_dir

MEGABYTE = 1_000_000


def test_the_packaged_weights_are_small() -> None:
    assert sum(file.stat().st_size for file in weights_dir().iterdir()) < 8 * MEGABYTE
