"""Frames, sizes, pixels and tokens of videos equal those of transformers' processors."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from clips import Clip
from numpy.typing import NDArray
from processors import processor_of, videos_of
from transformers import AutoTokenizer

from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.prompt import MediaLayouts
from epd_serve.models.families.qwen_vl import QwenVL
from epd_serve.models.loader import load_family
from epd_serve.models.video_processor import VideoProcessor
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import VideoFacts, VideoSampling


@dataclass(frozen=True, eq=False)
class Drawn(Clip):
    """Frames of noise."""

    data: bytes = b""
    total: int = 0
    rate: float = 1.0
    size: tuple[int, int] = (0, 0)

    def frames(self) -> tuple[NDArray[np.uint8], float]:
        width, height = self.size
        shape = self.total, height, width, 3
        return np.random.default_rng(self.total).integers(0, 256, shape, dtype=np.uint8), self.rate

    @property
    def item(self) -> MediaRef:
        sampling = VideoSampling(processor_fps=self.fps, num_frames=self.num_read)
        return MediaRef.of_video(VideoFacts(*self.size, self.total, self.rate), sampling)


def drawn(seed: int) -> Drawn:
    rng = random.Random(seed)
    total = rng.randrange(4, 36)
    return Drawn(
        total=total,
        rate=rng.choice([1.0, 5.0, 12.5, 24.0, 30000 / 1001, 60.0]),
        size=(rng.randrange(20, 120), rng.randrange(20, 120)),
        fps=rng.choice([None, None, 0.5, 1.0, 3.3]),
        num_read=rng.choice([None, None, None, rng.randrange(2, total)]),
    )


def inputs_of(processor: VideoProcessor, item: MediaRef, frames: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
    indices, inputs = processor.indices(item), processor.inputs(item)
    for start in range(0, len(indices), 3):
        inputs.add(frames[indices[start : start + 3]])
    return inputs.finish()


@pytest.mark.parametrize("kind", tiny_models.ALL_VIDEO_KINDS)
def test_tokens_and_pixels_of_videos_equal_the_processors(kind: str, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model(kind, tmp_path / kind)
    family, processor = load_family(path), processor_of(path)
    layouts = MediaLayouts(family, AutoTokenizer.from_pretrained(path))
    assert family.video is not None
    for seed in range(20):
        clip = drawn(seed)
        if kind in ("gemma4", "gemma4_unified"):  # which take no rate
            clip = replace(clip, fps=None)
        frames, _ = clip.frames()
        asked = videos_of(processor, [clip])
        expected = processor(text=[processor.video_token], return_tensors="pt", **asked)
        assert layouts.of(clip.item).ids == expected["input_ids"][0].tolist(), clip
        made = inputs_of(family.video, clip.item, frames)
        if kind.startswith("gemma4"):  # without padding
            is_patch = (expected["video_position_ids"] >= 0).all(-1)
            assert torch.equal(made["pixel_values"].flatten(0, 1), expected["pixel_values_videos"][is_patch]), clip
            places = expected["video_position_ids"][is_patch]
            assert torch.equal(made["image_position_ids"].flatten(0, 1), places), clip
            continue
        assert torch.equal(made["pixel_values"], expected["pixel_values_videos"]), clip
        assert torch.equal(made["image_grid_thw"], expected["video_grid_thw"]), clip
        if "second_per_grid_ts" in expected:
            seconds = family.video.seconds_per_patch(clip.item)
            assert torch.equal(torch.tensor([seconds]), expected["second_per_grid_ts"])


def test_a_rate_at_which_positions_are_fractions_is_refused(tmp_path: Path) -> None:
    family = load_family(tiny_models.make_tiny_model("qwen3_omni", tmp_path / "model"))
    assert isinstance(family, QwenVL)
    for fps in (None, 1.0, 2.0, 1.5):
        item = MediaRef.of_video(VideoFacts(64, 64, 24, 6.0), VideoSampling(processor_fps=fps))
        with pytest.raises(InvalidRequest, match="fractional video timestamps") if fps == 1.5 else nullcontext():
            family.position_facts(torch.tensor([[1]]), [item])


def test_a_video_that_gemma4_cannot_take_as_asked_is_refused(tmp_path: Path) -> None:
    family = load_family(tiny_models.make_tiny_model("gemma4", tmp_path / "model"))
    for facts, fps in ((VideoFacts(64, 64, 24, 6.0), 1.0), (VideoFacts(64, 64, 1, 6.0), None)):
        with pytest.raises(InvalidRequest, match="frames of the video cannot be sampled"):
            family.video_parts(MediaRef.of_video(facts, VideoSampling(processor_fps=fps)))


def test_a_processor_that_resizes_no_frames_is_refused(tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    file = path / "video_preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_resize": False}))
    with pytest.raises(ValueError, match="do_resize of the video processor is false"):
        load_family(path)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        (VideoSampling(num_frames=-1), 8),
        (VideoSampling(do_sample_frames=True), 8),
        (VideoSampling(do_sample_frames=False), 24),
        (VideoSampling(do_sample_frames=False, num_frames=6), 6),
        (VideoSampling(max_frames=5), 4),
        (VideoSampling(processor_fps=6.0, max_frames=10), 10),
        (VideoSampling(max_frames=100), 8),
    ],
)
def test_frames_that_are_taken_in_the_words_of_vllm(
    kind: str, sampling: VideoSampling, count: int, tmp_path: Path
) -> None:
    family = load_family(tiny_models.make_tiny_model(kind, tmp_path / kind))
    assert family.video is not None
    item = MediaRef.of_video(VideoFacts(64, 64, 24, 6.0), sampling)
    taken = family.video.indices(item)
    assert len(taken) == count and 0 <= item.num_sampled - count < 2
    assert taken == sorted({*taken}) and taken[0] == 0
