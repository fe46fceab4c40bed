"""The earliest time at which a new request's first token could come."""

from __future__ import annotations

from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage


def first_token_s(table: InstanceTable, num_prompt_tokens: int, *, has_media: bool) -> float:
    """Estimated seconds until the least loaded instances could give a new request its first token.

    Encoding and prefilling wait side by side, so the longer queue counts; the prompt's own computation and the
    wait for KV room at D come behind. 0 where no instance is ready, or nothing is known: an estimate to refuse
    requests by must not be too high.
    """
    prefills = table.ready(Stage.PREFILL)
    decodes = table.ready(Stage.DECODE)
    if not prefills or not decodes:
        return 0.0
    waiting = min(record.prefill_s for record in prefills)
    if has_media and (encoders := table.ready(Stage.ENCODE)):
        waiting = max(waiting, min(record.encode_s for record in encoders))
    computing = min(record.costs.prefill_s(num_prompt_tokens) for record in prefills)
    return waiting + computing + min(record.room_s(num_prompt_tokens) for record in decodes)
