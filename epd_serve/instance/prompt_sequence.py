"""The sequence that is computed for a prefill request."""

from __future__ import annotations

from epd_serve.instance.prompt import Prompt
from epd_serve.protocol import wire
from epd_serve.request import Sequence


def sequence_of(
    request: wire.PrefillRequest, prompt: Prompt, *, hand_off: bool, wanted_logprobs: range = range(0)
) -> Sequence:
    """``hand_off``: another instance decodes it."""
    return Sequence(
        request_id=request.request_id,
        prompt_ids=prompt.ids,
        sampling=prompt.sampling,
        max_tokens=prompt.max_tokens,
        positions=prompt.positions,
        position_delta=prompt.position_delta,
        spans=prompt.spans,
        block_hashes=prompt.block_hashes,
        num_sequences=request.sampling.n,
        hand_off=hand_off,
        constraint=prompt.constraint,
        output_ids=list(request.generated),
        wanted_logprobs=wanted_logprobs,
    )
