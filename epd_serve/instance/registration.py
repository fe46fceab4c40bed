"""An instance's description of itself, for ``/info``."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import torch

from epd_serve.config import InstanceOptions
from epd_serve.instance.language_engine import LanguageEngine
from epd_serve.models.family import Family
from epd_serve.protocol import wire
from epd_serve.protocol.addresses import url_of
from epd_serve.topology import RoleSwitch
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
    """Whatever its role; the rest is filled in by :func:`in_present_role`."""
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


def in_present_role(
    identity: wire.InstanceInfo,
    machine: RoleSwitch,
    language: LanguageEngine | None,
    *,
    ready: bool,
    load: wire.Load,
    num_tower_parameters: int,
    budgets: dict[str, float],
    steals: bool,
    block_size: int,
) -> wire.InstanceInfo:
    """``identity`` with what is so at the moment; ``language`` is None where the role has none."""
    info = msgspec.structs.replace(
        identity,
        role=str(machine.role),
        ready=ready,
        epoch=machine.epoch,
        state=machine.state,
        load=load,
        parameters={
            "tower": num_tower_parameters,
            "language_model": language.num_parameters if language else 0,
        },
        budgets=budgets,
        steals=steals and str(machine.role) == "EPD",
    )
    if language is None:
        return info
    return msgspec.structs.replace(
        info,
        max_model_len=language.max_model_len,
        block_size=block_size,
        kv_token_bytes=language.kv_token_bytes,
    )
