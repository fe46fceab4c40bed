"""What an instance says of itself whatever its role, for ``/info``."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from epd_serve.config import InstanceOptions
from epd_serve.models.family import Family
from epd_serve.protocol import wire
from epd_serve.protocol.addresses import url_of
from epd_serve.transfer.shared_memory import host_id

#: Pixels of an image for which tokens per pixel are given.
_TYPICAL_SIZE = (448, 448)


def identity(
    options: InstanceOptions,
    family: Family,
    dtype: torch.dtype,
    fingerprint: str,
    share: wire.AppliedShare | None,
) -> wire.InstanceInfo:
    """``load``, ``ready`` and all that follows from the role are to be filled in."""
    text = family.config.get_text_config()
    return wire.InstanceInfo(
        name=options.name,
        role=str(options.role),
        url=url_of(options.host, options.port),
        model=options.served_model_name,
        model_path=str(Path(options.model)),
        max_model_len=options.max_model_len or text.max_position_embeddings,
        media_fingerprint=fingerprint,
        device=options.device,
        dtype=str(dtype).removeprefix("torch."),
        pid=os.getpid(),
        ready=False,
        load=wire.Load(),
        share=share,
        host_id=host_id(),
        tokens_per_pixel=family.num_image_tokens(_TYPICAL_SIZE) / math.prod(_TYPICAL_SIZE),
        feature_token_bytes=dtype.itemsize * text.hidden_size,
    )
