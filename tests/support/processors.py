"""transformers' own processors of checkpoints, and clips as they take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from clips import Clip
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

#: Frames a second that the engine samples where neither a request nor the checkpoint says.
USUAL_FPS = 2


def processor_of(path: Path) -> Any:
    return AutoProcessor.from_pretrained(path)


def videos_of(processor: Any, clips: Sequence[Clip]) -> dict[str, Any]:
    """The arguments by which a processor is called with clips: the frames that are read, or that it samples."""
    sampler, frames, metadata = processor.video_processor, [], []
    for clip in clips:
        whole, rate = clip.frames()
        facts = VideoMetadata(total_num_frames=len(whole), fps=rate)
        if clip.is_list:
            facts.frames_indices = list(range(len(whole)))
        elif clip.num_read is not None:
            facts.frames_indices = np.linspace(0, len(whole) - 1, clip.num_read, dtype=int).tolist()
        else:
            fps = clip.fps or sampler.fps or (None if sampler.num_frames else USUAL_FPS)
            facts.frames_indices = sampler.sample_frames(facts, fps=fps).tolist()
        frames.append(whole[facts.frames_indices])
        metadata.append(facts)
    asked = next(({"fps": clip.fps} for clip in clips if clip.fps), {})
    return {"videos": frames, "video_metadata": metadata, "do_sample_frames": False, **asked}
