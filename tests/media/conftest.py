from __future__ import annotations

import pytest
from places import ignore_other_pools


@pytest.fixture(autouse=True)
def _own_decoders() -> None:
    ignore_other_pools()
