"""Rotary position tables, plain and multimodal; made once per step, so plain torch serves every backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary_tables(
    positions: Tensor,
    inverse_frequencies: Tensor,
    sections: Sequence[int] | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for ``AttentionOps.rotary``.

    Args:
        positions: [T], or [3, T] (time, height, width) with ``sections``.
        inverse_frequencies: [D / 2].
        sections: counts of the D / 2 frequencies that turn with time, height, width (M-RoPE; Qwen2-VL paper, 2.1).
        interleaved: the axes alternate along the frequencies (Qwen3-VL) instead of lying in three runs; what
            height and width leave over turns with time.

    Returns:
        cos, sin: [T, D] float32, the second half repeating the first.

    Raises:
        ValueError: positions and sections do not fit each other, or sections do not add up to D / 2.
    """
    half = inverse_frequencies.shape[0]
    if sections is None:
        if positions.dim() != 1:
            raise ValueError(f"positions of shape {tuple(positions.shape)} without sections; they must be [T]")
        angles = positions.float()[:, None] * inverse_frequencies.float()
    else:
        if positions.dim() != 2 or positions.shape[0] != 3 or len(sections) != 3:
            raise ValueError(
                f"positions {tuple(positions.shape)} with sections {list(sections)}; both must be of 3 axes"
            )
        if sum(sections) != half:
            raise ValueError(f"sections {list(sections)} do not add up to the {half} frequencies")
        axes = _axes(sections, interleaved=interleaved, device=positions.device)
        angles = positions.float()[axes].transpose(0, 1) * inverse_frequencies.float()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _axes(sections: Sequence[int], *, interleaved: bool, device: torch.device) -> Tensor:
    """The position axis that turns each frequency: [D / 2] of 0 (time), 1 (height), 2 (width).

    Computed on the device: a captured step may not copy from the host.
    """
    time, height, width = sections
    index = torch.arange(time + height + width, device=device)
    if not interleaved:
        return (index >= time).long() + (index >= time + height).long()
    axis = index % 3
    return ((axis == 1) & (index < 3 * height)).long() + 2 * ((axis == 2) & (index < 3 * width)).long()
