"""EPD (001): time to first token with the frames or images of a request shared out over encoders.

Table 1: the frames of a video, eight to 64, against monolithic (vLLM) and prefill-decode (DistServe) instances.
Table 4: two to eight pictures of ten slices each. Both on A100s by their data sheet, and with the stage times that
the table implies (:func:`frame_times`, :func:`paper_profile`). Requests come one after the other: at the
paper's 1 and 0.25 a second they hardly meet on eight GPUs. Table 6 is ``python -m benchmarks.elastic emulated``.

MiniCPM-V 2.6 has the language model of Qwen2-VL-7B. So pictures here have such a size that Qwen2-VL makes as many
tokens of them as MiniCPM-V of the paper's, and an encode takes what MiniCPM-V's tower takes for these. Qwen2-VL
sees two frames as one picture: frames here are twice as wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.papers.measure import Deployment, Load, Rows, markdown
from device.datasheets import spec_of
from epd_serve.cost.profile import EncodeLine, Line, Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import ModelShape, VisionShape, shape_of
from epd_serve.topology import parse_topology

SHAPE, SLOWNESS, IMPLIED_SLOWNESS = "qwen2-vl-7b", 20.0, 3.0
#: Table 1: seconds with so many frames.
FRAMES = (8, 16, 32, 64)
TABLE_1 = {
    "vLLM": (0.42, 0.82, 1.59, 3.11),
    "DistServe": (0.42, 0.81, 1.54, 3.08),
    "EPD": (0.24, 0.30, 0.49, 1.00),
}
#: The first stands for vLLM and the second for DistServe: with requests one after the other, one instance of the
#: paper's eight, or one P, has each of them.
VIDEO_LINES = ("EPD", "EP-D", "E-P-D", "2E-P-D", "4E-P-D")
ENCODERS = ("2E-P-D", "4E-P-D")
#: With the times of the paper, as many encoders as its default has (5E2P1D, appendix A.3).
NUM_ENCODERS = 5
IMPLIED_LINES = ("EPD", "E-P-D", f"{NUM_ENCODERS}E-P-D")
NUM_IMAGES = (2, 4, 6, 8)
#: EPD, Table 4: seconds with 2, 4, 6 and 8 images in a request. MiniCPM-V 2.6, 0.25 requests a second, images of
#: 4032x3024 pixels, prompts of 22 tokens (sections 4 and 4.2).
TABLE_4 = {"parallel": (0.92, 1.02, 1.14, 1.74), "together": (1.46, 2.47, 3.37, 4.27)}
NUM_TEXT_TOKENS, NUM_OUTPUT_TOKENS = 22, 10
SHEET, IMPLIED = "data sheet", "times of the paper"
NUM_REQUESTS = 3
#: A frame is one slice of 448 pixels square, a picture of 4032x3024 pixels ten: 64 tokens each. In Qwen2-VL a
#: token has 28x28 pixels.
FRAME, FRAME_SIZE, FPS = 64, (448, 224), 2
PICTURE, PICTURE_SIZE = 640, (896, 560)


#: Ten slices of 448 pixels square of each image of that size, 64 tokens each; a slice attends to itself alone.
MINICPM_V = ModelShape(
    name="minicpm-v-2.6",
    language=shape_of("qwen2-vl-7b").language,
    vision=VisionShape(
        num_layers=27,
        hidden=1152,
        intermediate=4304,
        patch_size=14,
        merge=4,
        tokens_per_image=640,
        window_patches=1024,
    ),
)


def _implied(table: int, num_tokens: int, encode_s: float, prefill_s: float, request_s: float) -> Profile:
    """Times of a tower's picture of so many tokens and of its prefill, and of a request whatever its pictures."""
    shape = analytic_profile(MINICPM_V, spec_of("a100"))
    return Profile(
        kind="measured",
        device="a100",
        model=MINICPM_V.name,
        description=f"EPD, Table {table}",
        step=(Line(token_s=prefill_s / num_tokens),),
        encode=(EncodeLine(image_s=encode_s),),
        memory_bytes=shape.memory_bytes,
        language_bytes=shape.language_bytes,
        kv_token_bytes=shape.kv_token_bytes,
        feature_token_bytes=shape.feature_token_bytes,
        num_layers=shape.num_layers,
        tokens_per_image=num_tokens,
        link_bytes_per_s=shape.link_bytes_per_s,
        request_s=request_s,
    )


def frame_times() -> Profile:
    """Times that Table 1 implies. From 8 to 64 frames, vLLM's row grows by encode and prefill of a frame, EPD's by
    the prefill and its encoders' share of the encode. Two frames are one picture here."""
    together, shared = ((row[-1] - row[0]) / (FRAMES[-1] - FRAMES[0]) for row in (TABLE_1["vLLM"], TABLE_1["EPD"]))
    encode_s = (together - shared) * NUM_ENCODERS / (NUM_ENCODERS - 1)
    request_s = TABLE_1["vLLM"][0] - FRAMES[0] * together
    return _implied(1, 2 * FRAME, 2 * encode_s, 2 * (together - encode_s), request_s)


def paper_profile() -> Profile:
    """Times that Table 4 implies. From 2 to 6 images, one for each encoder, its first row grows by what prefill
    takes for an image; its second by encode and prefill. What is left at 2 images takes no part in either."""
    first, second = TABLE_4["parallel"], TABLE_4["together"]
    prefill_s = (first[2] - first[0]) / 4
    encode_s = (second[3] - second[0]) / 6 - prefill_s
    return _implied(4, PICTURE, encode_s, prefill_s, first[0] - encode_s - 2 * prefill_s)


def data_sheet(num_tokens: int) -> Profile:
    """The times of an A100 for pictures of so many of the tower's tokens, whatever their size here."""
    assert MINICPM_V.vision is not None
    shape = replace(MINICPM_V, vision=replace(MINICPM_V.vision, tokens_per_image=num_tokens))
    return analytic_profile(shape, replace(spec_of("a100"), launch_s=0.0))


def _deployment(name: str, topology: str, profile: Profile, loads: Sequence[Load], slowness: float) -> Deployment:
    return Deployment(
        name=name,
        topology=topology,
        devices=(profile,) * parse_topology(topology).num_devices,
        shape=SHAPE,
        slowness=slowness,
        loads=tuple(loads),
    )


def _load(name: str, media: str, workload: str = "synthetic") -> Load:
    tokens = f"text_tokens={NUM_TEXT_TOKENS},output_tokens={NUM_OUTPUT_TOKENS}"
    return Load(name=name, workload=f"{workload},image_share=1,{media},{tokens}", num_requests=NUM_REQUESTS)


def _video(num_frames: int) -> Load:
    width, height = FRAME_SIZE
    seconds = f"video_s={num_frames // FPS},video_fps={FPS}"
    return _load(f"{num_frames} frames", f"video_size={width}x{height},{seconds}", "videos")


def deployments() -> list[Deployment]:
    frames, size = [_video(count) for count in FRAMES], f"image_size={PICTURE_SIZE[0]}x{PICTURE_SIZE[1]}"
    pictures = [_load(f"{count} images", f"images={count},{size}") for count in NUM_IMAGES]
    found = [_deployment(f"frames: {line}", line, data_sheet(2 * FRAME), frames, SLOWNESS) for line in VIDEO_LINES]
    for line in IMPLIED_LINES:
        found.append(_deployment(f"frames, {IMPLIED}: {line}", line, frame_times(), frames, IMPLIED_SLOWNESS))
    for times, profile, slowness in ((SHEET, data_sheet(PICTURE), SLOWNESS), (IMPLIED, paper_profile(), 1.0)):
        for line in ENCODERS:
            found.append(_deployment(f"{times}: {line}", line, profile, pictures, slowness))
    return found


def _prefill_s(num_frames: int) -> float:
    """Seconds that the data sheet has for the prompt of so many frames, in one step of one instance."""
    num_tokens = num_frames * FRAME + NUM_TEXT_TOKENS
    return data_sheet(FRAME).step_s(num_tokens, 1, pairs=num_tokens**2)


def _encode_part(rows: Rows) -> str:
    """What the time to the first token has beyond the prefill, which more encoders do not shorten."""
    lines: list[list[str]] = []
    for line in ("E-P-D", *ENCODERS):
        found = [rows.get((f"frames: {line}", f"{count} frames")) for count in FRAMES]
        pairs = zip(FRAMES, found, strict=True)
        seconds = [None if row is None else row["ttft_ms"] / 1e3 - _prefill_s(count) for count, row in pairs]
        lines.append([f"`{line}`", *("-" if one is None else f"{one:.3f}" for one in seconds)])
    lines.append(["prefill alone, data sheet", *(f"{_prefill_s(count):.3f}" for count in FRAMES)])
    pair_s = data_sheet(2 * FRAME).encode_s([FRAME_SIZE[0] * FRAME_SIZE[1]])
    lines.append(["encode on one device, data sheet", *(f"{count / 2 * pair_s:.3f}" for count in FRAMES)])
    return markdown(["table 1: seconds beyond the prefill", *(f"{count} frames" for count in FRAMES)], lines)


def report(rows: Rows) -> str:
    """Seconds to the first token, ours and the paper's."""

    def seconds(name: str, counts: Sequence[int], unit: str = "images") -> list[str]:
        found = [rows.get((name, f"{count} {unit}")) for count in counts]
        idle = [row["host_idle"] for row in found if row is not None]
        times = ["-" if row is None else f"{row['ttft_ms'] / 1e3:.2f}" for row in found]
        return [*times, f"{min(idle):.0%}" if idle else "-"]

    lines = [[f"`{line}`", *seconds(f"frames: {line}", FRAMES, "frames")] for line in VIDEO_LINES]
    name = f"frames, {IMPLIED}"
    lines += [[f"`{line}`, {IMPLIED}", *seconds(f"{name}: {line}", FRAMES, "frames")] for line in IMPLIED_LINES]
    lines += [[f"{name}, paper", *(f"{value:.2f}" for value in row), "-"] for name, row in TABLE_1.items()]
    head = ["table 1: seconds to the first token", *(f"{count} frames" for count in FRAMES), "least host idle"]
    parts = [markdown(head, lines), _encode_part(rows)]
    lines = [
        [f"`{line}`, {times}", *seconds(f"{times}: {line}", NUM_IMAGES)]
        for times in (SHEET, IMPLIED)
        for line in ENCODERS
    ]
    for name, label in (("parallel", "EPD, paper"), ("together", "EPD without IRP, paper")):
        lines.append([label, *(f"{value:.2f}" for value in TABLE_4[name]), "-"])
    head = ["table 4: seconds to the first token", *(f"{count} images" for count in NUM_IMAGES), "least host idle"]
    parts.append(markdown(head, lines))
    tables = (("1", frame_times()), ("4", paper_profile()))
    constants = [f"Table {name} implies {one.request_s:.2f} s more for each request.\n" for name, one in tables]
    return "\n".join([*parts, *constants])
