"""Frames, sizes, pixels and tokens of videos equal those of transformers' processors."""

from __future__ import annotations

import json
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from numpy.typing import NDArray
from plain_torchvision import run_beside_torchvision
from plain_video import Clip, PlainVideoProcessor
from processors import processor_of
from transformers import AutoTokenizer

from epd_serve.errors import InvalidRequest
from epd_serve.instance.text.prompt import MediaLayouts
from epd_serve.models.families.qwen_vl import QwenVL
from epd_serve.models.loader import load_family
from epd_serve.models.video_processor import VideoProcessor, gemma4_video, qwen2_video, qwen3_video
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import VideoFacts, VideoSampling

TORCHVISION = os.environ.get("EPD_SERVE_TORCHVISION")


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
def test_tokens_and_pixels_of_fifty_videos_equal_the_processors(kind: str, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model(kind, tmp_path / kind)
    family, processor = load_family(path), processor_of(path)
    layouts = MediaLayouts(family, AutoTokenizer.from_pretrained(path))
    assert family.video is not None
    for seed in range(50):
        clip = drawn(seed)
        if kind in ("gemma4", "gemma4_unified"):  # which take no rate
            clip = replace(clip, fps=None)
        frames, _ = clip.frames()
        processor.video_processor = PlainVideoProcessor(path, [clip])
        asked = {} if clip.fps is None else {"fps": clip.fps}
        expected = processor(text=[processor.video_token], videos=[frames], return_tensors="pt", **asked)
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


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [
        {},
        {"min_pixels": 56 * 56, "max_pixels": 112 * 112},
        {"size": {"shortest_edge": 784, "longest_edge": 140 * 140}, "cap_pixels_per_frame": True}
        | {"max_video_tokens": 200},
    ],
    "qwen3": [
        {},
        {"patch_size": 14, "size": {"shortest_edge": 4 * 784, "longest_edge": 64 * 784}, "max_frames": 10},
        {"size": {"shortest_edge": 4 * 784, "longest_edge": 64 * 784}, "cap_pixels_per_frame": True}
        | {"max_video_tokens": 10},
    ],
}


def compare(seed: int) -> None:
    """Hold a drawn video against transformers' own classes, which need torchvision. In a process of its own."""
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    for name, theirs, ours in (
        ("qwen2", Qwen2VLVideoProcessor, qwen2_video),
        ("qwen3", Qwen3VLVideoProcessor, qwen3_video),
    ):
        clip, settings = drawn(seed), SETTINGS[name][0 if seed % 8 == 0 else 1 + seed % 2]
        frames, rate = clip.frames()
        item = MediaRef.of_video(VideoFacts(*clip.size, clip.total, rate), VideoSampling(processor_fps=clip.fps))
        expected = theirs(**settings)(
            videos=[frames],
            video_metadata=[VideoMetadata(total_num_frames=clip.total, fps=rate)],
            do_sample_frames=True,
            fps=clip.fps or 2,
            return_metadata=True,
            return_tensors="pt",
        )
        for given in (settings, json.loads(theirs(**settings).to_json_string())):
            made = inputs_of(ours(given), item, frames)
            assert ours(given).indices(item) == list(expected["video_metadata"][0].frames_indices), (name, seed)
            assert torch.equal(made["pixel_values"], expected["pixel_values_videos"]), (name, seed)
            assert torch.equal(made["image_grid_thw"], expected["video_grid_thw"]), (name, seed)


def compare_frames(seed: int) -> None:
    """The same for Gemma 4's."""
    from transformers import Gemma4VideoProcessor
    from transformers.models.gemma4.video_processing_gemma4 import get_aspect_ratio_preserving_size
    from transformers.video_utils import VideoMetadata

    clip, theirs = replace(drawn(seed), fps=None), Gemma4VideoProcessor(num_frames=4)
    frames, rate = clip.frames()
    expected = theirs(
        videos=[frames],
        video_metadata=[VideoMetadata(total_num_frames=clip.total, fps=rate)],
        return_metadata=True,
        return_tensors="pt",
    )
    item = MediaRef.of_video(VideoFacts(*clip.size, clip.total, rate), VideoSampling())
    for given in ({"num_frames": 4}, json.loads(theirs.to_json_string())):
        ours = gemma4_video(given, get_aspect_ratio_preserving_size)
        made, is_patch = inputs_of(ours, item, frames), (expected["video_position_ids"] >= 0).all(-1)
        assert ours.indices(item) == list(expected["video_metadata"][0].frames_indices), seed
        assert torch.equal(made["pixel_values"].flatten(0, 1), expected["pixel_values_videos"][is_patch]), seed
        places = expected["video_position_ids"][is_patch]
        assert torch.equal(made["image_position_ids"].flatten(0, 1), places), seed


@pytest.mark.slow
@pytest.mark.skipif(TORCHVISION is None, reason="EPD_SERVE_TORCHVISION names no directory with torchvision")
def test_pixels_equal_those_of_transformers_own_classes() -> None:
    """In a process of its own: with torchvision there, transformers reads pictures in another way."""
    run_beside_torchvision(
        TORCHVISION,
        "import torchvision.transforms.v2.functional\n"
        "import test_video_processor\n"
        "for seed in range(1, 10): test_video_processor.compare(seed)\n"
        "for seed in range(1, 10): test_video_processor.compare_frames(seed)\n",
    )


@pytest.mark.parametrize("make", [qwen2_video, qwen3_video])
def test_a_processor_that_is_not_known_is_refused(make: Any) -> None:
    for wrong in ({"do_resize": False}, {"do_normalize": False}, {"resample": 2}, {"crop_to_patches": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make(wrong)


@pytest.mark.parametrize("make", [qwen2_video, qwen3_video])
def test_a_video_of_one_frame_is_refused(make: Any) -> None:
    item = MediaRef.of_video(VideoFacts(64, 64, 1, 25.0), VideoSampling())
    with pytest.raises(InvalidRequest, match=r"frames of the video|needs at least 2"):
        make({}).grid(item)


def test_fewer_frames_than_a_patch_has_are_refused_as_such() -> None:
    item = MediaRef.of_video(VideoFacts(64, 64, 24, 25.0), VideoSampling(processor_num_frames=1))
    with pytest.raises(
        InvalidRequest, match="0 of the video's 24 frames would be encoded; the model needs at least 2"
    ):
        qwen2_video({}).grid(item)


def test_a_rate_at_which_positions_are_fractions_is_refused(tmp_path: Path) -> None:
    family = load_family(tiny_models.make_tiny_model("qwen3_omni", tmp_path / "model"))
    assert isinstance(family, QwenVL)
    for fps in (None, 1.0, 2.0, 1.5):
        item = MediaRef.of_video(VideoFacts(64, 64, 24, 6.0), VideoSampling(processor_fps=fps))
        with pytest.raises(InvalidRequest, match="in fractions") if fps == 1.5 else nullcontext():
            family.position_facts(torch.tensor([[1]]), [item])


def test_a_video_that_gemma4_cannot_take_as_asked_is_refused(tmp_path: Path) -> None:
    family = load_family(tiny_models.make_tiny_model("gemma4", tmp_path / "model"))
    for facts, fps, words in (
        (VideoFacts(64, 64, 24, 6.0), 1.0, "ask for num_frames, not for fps"),
        (VideoFacts(64, 64, 1, 6.0), None, "1 frames, fewer than the 2"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            family.video_parts(MediaRef.of_video(facts, VideoSampling(processor_fps=fps)))
