"""A server's books, by the names of its metrics: it holds nothing once all requests are over."""

from __future__ import annotations

import asyncio
import time

from epd_serve.verify.check import Failed, Unjudged
from epd_serve.verify.client import Client

#: Gauges that are 0 in an idle server: ours, vLLM's, SGLang's and Dynamo's.
HELD = (
    "epd_serve_num_requests_running",
    "epd_serve_num_requests_waiting",
    "epd_serve_in_flight_calls",
    "epd_serve_instance_requests",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_used_tokens",
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_queued_requests",
)
#: Seconds in which what an ended request held has to be given back; what dead parts held goes by leases.
SETTLE_S, LEASES_S = 15.0, 45.0


async def balanced(client: Client, settle_s: float = SETTLE_S) -> None:
    """Wait until nothing is held. Raises Failed with what still is, and Unjudged where no metric tells."""
    settle_s = client.within(settle_s)
    end_s = time.monotonic() + settle_s
    while True:
        seen = {name: value for name, value in (await client.metrics()).items() if name.split("{")[0] in HELD}
        if not seen:
            raise Unjudged("the rest is right; no metric tells what the server holds")
        held = {name: value for name, value in seen.items() if value}
        if not held:
            return
        if time.monotonic() > end_s:
            raise Failed(f"{settle_s:g} s after the last request: {held}")
        await asyncio.sleep(0.2)
