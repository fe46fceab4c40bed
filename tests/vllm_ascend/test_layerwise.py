"""Why vllm-ascend's layerwise connector is not used; a failure here is news from the vendor."""

from __future__ import annotations

import pytest
from vllm_ascend_runs import Vendor

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_d_is_told_that_kv_has_come_whose_write_failed_and_never_hears_of_a_failure(vendor: Vendor) -> None:
    found = vendor("layerwise_faults.py", None)
    assert found["told"] == {"first": True, "second": False}, "the write of both has failed"
    assert found["reported"] == [], "D's scheduler waits for the request, and keeps its blocks when it is aborted"
