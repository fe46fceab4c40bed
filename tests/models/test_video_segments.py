"""Segments of a video: whole groups of frames, each once and in order; inputs and features are the video's own."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from clips import Clip, clip, moving
from engine_bench import EngineBench
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from reference import Reference
from torch import Tensor
from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

from device.cpu import CpuDevice
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.models.video_processor import VideoProcessor
from epd_serve.protocol.wire import MediaRef
from epd_serve.sched.schedule import Budget
from epd_serve.types import AS_THE_MODEL, VideoFacts, VideoSampling

PROCESSORS = [
    VideoProcessor(one)
    for one in (Qwen2VLVideoProcessor(), Qwen3VLVideoProcessor(), Qwen3VLVideoProcessor(temporal_patch_size=3))
]


@st.composite
def videos(draw: st.DrawFn) -> MediaRef:
    facts = VideoFacts(
        draw(st.integers(28, 90)), 60, draw(st.integers(4, 400)), draw(st.sampled_from([1.0, 24.0]))
    )
    asked = VideoSampling(num_frames=draw(st.none() | st.integers(4, facts.num_frames)))
    item = replace(MediaRef.of_video(facts, asked), mm_hash="a video")
    return replace(item, num_segments=draw(st.integers(1, 9)))


@given(videos(), st.sampled_from(PROCESSORS))
def test_segments_cover_the_frames_once_in_order_and_in_whole_groups(
    item: MediaRef, processor: VideoProcessor
) -> None:
    whole, step = processor.indices(item), processor.frames_per_patch
    parts = item.segments
    indices = [processor.indices(part) for part in parts]
    assert list(chain.from_iterable(indices)) == whole
    assert len({part.mm_hash for part in parts}) == item.num_segments
    filled = [frames for frames in indices if frames]
    assert all(len(frames) % step == 0 for frames in filled[:-1])
    groups = [processor.grid(part)[0] for part in parts]
    assert sum(groups) == processor.grid(item)[0] and max(groups) - min(groups) <= 1
    assert sum(map(processor.num_tokens, parts)) == processor.num_tokens(item)
    assert sum(map(processor.num_pixels, parts)) == processor.num_pixels(item)
    assert sum(part.num_pixels for part in parts) == item.num_pixels
    if item.num_segments == 1:
        assert parts == [item]


def test_names_of_segments_say_of_which_video_and_which_segment_they_are() -> None:
    item = replace(MediaRef.of_video(VideoFacts(64, 64, 60, 2.0), AS_THE_MODEL), mm_hash="a")
    names = [
        part.mm_hash
        for one in (item, replace(item, mm_hash="b"))
        for count in (2, 3, 4)
        for part in replace(one, num_segments=count).segments
    ]
    assert len(set(names)) == len(names) and {len(name) for name in names} == {64}


def inputs_of(processor: VideoProcessor, item: MediaRef, frames: Any) -> dict[str, Tensor]:
    inputs = processor.inputs(item)
    inputs.add(frames[processor.indices(item)])
    return inputs.finish()


KINDS = pytest.mark.parametrize(
    "kind",
    [
        *("qwen2_5_vl", "qwen3_vl", "gemma4"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5", *tiny_models.OMNI_KINDS)),
    ],
)


@KINDS
def test_inputs_and_features_of_segments_are_those_of_the_video(kind: str, tmp_path: Path) -> None:
    """Inputs to the bit. A tower multiplies matrices of fewer rows, which may round in another way."""
    path = tiny_models.make_tiny_model(kind, tmp_path / kind)
    family = load_family(path)
    assert family.video is not None and family.splits_videos
    tower = Tower(path, torch.float32, CpuDevice(), family=family)
    frames = moving(3, 26, (70, 96))
    item = replace(MediaRef.of_video(VideoFacts(70, 96, 26, 4.0), VideoSampling()), mm_hash="a video")
    segments = [one for one in replace(item, num_segments=3).segments if family.num_tokens(one)]
    assert len(segments) == min(3, family.video.grid(item)[0]) > 1
    whole = inputs_of(family.video, item, frames)
    parts = [inputs_of(family.video, part, frames) for part in segments]
    for name, values in whole.items():
        joined = [part[name] for part in parts]
        if name == "image_grid_thw":
            assert sum(grid[0, 0] for grid in joined) == values[0, 0]
        else:
            assert torch.equal(torch.cat(joined), values), name
    [feature] = tower.encode([whole])
    joined = torch.cat([tower.encode([part])[0] for part in parts])
    torch.testing.assert_close(joined, feature, rtol=1e-4, atol=3e-5)
    assert [len(tower.encode([part])[0]) for part in parts] == [family.num_tokens(one) for one in segments]


@KINDS
def test_tokens_of_a_video_in_segments_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    """Gemma's file takes two frames: the third segment has none."""
    path, text = tiny_models.make_tiny_model(kind, tmp_path / kind), "What happens?"
    video = Clip(clip(1, 24, (96, 64), fps=6))
    bench = EngineBench(path, Budget(max_num_tokens=20, max_num_seqs=4))
    bench.encode([video], num_segments=3)
    assert len(bench.features) == (2 if kind == "gemma4" else 3)
    bench.engine.submit(bench.sequence("video", text, [video], num_segments=3))
    assert bench.collect(1)["video", 0] == Reference(path).generate(text, videos=[video], max_tokens=12)
    bench.check_idle()
    bench.close()
