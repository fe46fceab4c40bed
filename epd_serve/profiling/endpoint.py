"""Profile a running vLLM server over HTTP.

Single prompts measure prefill, concurrent answers measure decode steps, pictures measure encode including the
host's preprocessing. The server should be idle otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import median
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
from rich.console import Console

from device.datasheets import DEVICE_SPECS
from epd_serve import __version__
from epd_serve.backends.vllm_metrics import read_figures
from epd_serve.bench.session import Session
from epd_serve.bench.types import Record, RunSettings
from epd_serve.bench.workloads import load_workload
from epd_serve.cost.least_squares import fit_relative
from epd_serve.cost.profile import Line, Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.profiling.fits import Sample, decode_lines, encode_line, with_residuals

#: Grid: prompt tokens; concurrent answers and their prompt tokens; image sides and images per request.
PROMPTS = (32, 128, 512, 1024, 2048)
DECODES, CONTEXTS = (1, 2, 4, 8, 16, 32), (32, 1024)
SIDES, IMAGES = (224, 448, 896), (1, 2)
NUM_REQUESTS = 8
_PROMPT_OUTPUT, _DECODE_OUTPUT = 8, 48
#: Tokens that a chat template may add, and inaccuracy of word counts.
_MARGIN = 64
_TEXT = 10
_TIMEOUT_S = 60.0
#: Smallest time that can be distinguished from the rest of a request.
_MIN_S = 1e-5
#: Link bytes per second of a device without a data sheet.
UNKNOWN_LINK = 4e9


def profile_endpoint(
    url: str, model: str, device: str, progress: Callable[[str], None] = lambda text: None
) -> Profile:
    """Measure a server and fit.

    Args:
        model: the model whose sizes apply.
        device: the server's device, as named in devices.yaml.

    Raises ValueError for a server that does not answer or is not vLLM.
    """
    shape = shape_of(model)
    card = json.loads(_read_page(url, "/v1/models"))["data"][0]
    max_model_len = card.get("max_model_len") or 1 << 31
    figures = read_figures(_read_page(url, "/metrics"))
    num_kv_tokens = figures.num_blocks * figures.block_size
    if not num_kv_tokens:
        raise ValueError(
            f"{url}/metrics lacks vllm:cache_config_info: --endpoint needs a vLLM server; profile native "
            "instances without it"
        )
    version = json.loads(_read_page(url, "/version"))["version"]
    with tempfile.TemporaryDirectory(prefix="epd-serve-profile-") as folder:
        ask = _Client(url=url, folder=Path(folder), progress=progress, model=card["id"])
        prompts = [
            ask(_text_load(count, _PROMPT_OUTPUT), NUM_REQUESTS)
            for count in PROMPTS
            if count + _PROMPT_OUTPUT + _MARGIN <= max_model_len
        ]
        decodes = [
            (count, ask(_text_load(context, _DECODE_OUTPUT), count, f"closed:{count}"))
            for count in DECODES
            for context in CONTEXTS
            if context + _DECODE_OUTPUT + _MARGIN <= max_model_len
            and count * (context + _DECODE_OUTPUT + _MARGIN) <= num_kv_tokens
        ]
        image_load = _text_load(_TEXT, _PROMPT_OUTPUT, 1)
        pictures = [
            (side, count, ask(f"{image_load},image_size={side}x{side},images={count}", NUM_REQUESTS))
            for side in (SIDES if shape.vision is not None else ())
            for count in IMAGES
        ]
    steps: list[Sample] = []
    for count, records in decodes:
        gap_s = median(_step_s(one) for one in records)
        context = median((one.num_prompt_tokens or 1) + one.num_output_tokens / 2 for one in records)
        steps.append(("decode", [float(count), float(count), count * context, 0.0], max(gap_s, _MIN_S)))
    tokens, ttft_s = zip(*(_first_token(records) for records in prompts), strict=True)
    request_s = max(ttft_s[0] - min(seconds for _, work, seconds in steps if work[1] == 1), 0.0)
    prefills: list[Sample] = [
        ("prefill", [count, 1.0, 0.0, count**2], max(seconds - request_s, _MIN_S))
        for count, seconds in zip(tokens, ttft_s, strict=True)
    ]
    device = device.split(":")[0]
    sheet = DEVICE_SPECS.get(device)
    sizes = analytic_profile(shape, sheet or next(iter(DEVICE_SPECS.values())))
    known = msgspec.structs.replace(
        sizes,
        kind="measured",
        device=device,
        description=f"vLLM {version} at {url}, over HTTP",
        software={"epd-serve": __version__, "vllm": version},
        dtype="float32" if shape.value_bytes == 4 else "bfloat16",
        step=(_step_line(prefills, steps),),
        decode=decode_lines(steps),
        encode=(),
        compute_share=1.0,
        bandwidth_share=1.0,
        request_s=request_s,
        memory_bytes=num_kv_tokens * shape.kv_token_bytes + sizes.language_bytes + sizes.tower_bytes,
        link_bytes_per_s=UNKNOWN_LINK if sheet is None else sheet.link_bytes_per_s,
    )
    encodes: list[Sample] = []
    for side, count, records in pictures:
        num_tokens, first_s = _first_token(records)
        rest_s = known.request_s + known.step_s(num_tokens, 1, 0, num_tokens**2)  # of the request and its prompt
        pixels = float(known.resized([side * side])[0])
        encodes.append(("encode", [float(count), pixels], max(first_s - rest_s, _MIN_S)))
    if encodes:
        known = msgspec.structs.replace(known, encode=(encode_line(encodes),))
    return with_residuals(msgspec.structs.replace(known, samples=[*encodes, *prefills, *steps]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Client:
    """Sends workloads to the measured server."""

    url: str
    folder: Path
    progress: Callable[[str], None]
    model: str
    #: One per measurement, so that no prompt or picture is cached from an earlier one.
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self, workload: str, count: int, arrivals: str = "closed:1") -> list[Record]:
        """Send ``count`` requests of a workload. Raises ValueError unless all succeed."""
        self.progress(f"{self.url}: {workload}, {arrivals}")
        session = Session(console=Console(file=StringIO()), api_key=os.environ.get("OPENAI_API_KEY") or None)
        settings = RunSettings(
            base_url=self.url,
            model=self.model,
            workload=workload,
            num_requests=count,
            seed=next(self.seeds),
            arrivals=arrivals,
            num_warmups=2,
        )
        run = session.run(Path(tempfile.mkdtemp(dir=self.folder)), settings, load_workload(workload))
        records = [one for one in run.records if one.succeeded and len(one.token_times_s) > 2]
        if len(records) < count:
            failed = [one.detail for one in run.records if not one.succeeded]
            raise ValueError(f"{self.url}: {failed[0] if failed else 'an answer had too few tokens'}")
        return records


def _text_load(num_tokens: int, num_output: int, image_share: int = 0) -> str:
    return f"synthetic,text_tokens={num_tokens},output_tokens={num_output},image_share={image_share}"


def _first_token(records: Sequence[Record]) -> tuple[float, float]:
    """Return the median prompt tokens and seconds to the first token."""
    return median(one.num_prompt_tokens or 1 for one in records), median(one.ttft_s or 0.0 for one in records)


def _step_s(record: Record) -> float:
    """Return the mean step of an answer's second half, without prefills. Events may have several tokens."""
    times_s = record.token_times_s[len(record.token_times_s) // 2 :]
    num_tokens = (len(times_s) - 1) * record.num_output_tokens / len(record.token_times_s)
    return (times_s[-1] - times_s[0]) / num_tokens


def _step_line(prefills: Sequence[Sample], decodes: Sequence[Sample]) -> Line:
    """Fit steps with prompts; decodes in them cost as much as in steps of decodes alone."""
    base_s, token_s, pair_s = fit_relative(
        [[1.0, work[0], work[3]] for _, work, _ in prefills], [seconds for *_, seconds in prefills]
    )
    _, sequence_s, context_s = fit_relative(
        [[1.0, work[1], work[2]] for _, work, _ in decodes], [seconds for *_, seconds in decodes]
    )
    return Line(base_s=base_s, token_s=token_s, sequence_s=sequence_s, context_s=context_s, pair_s=pair_s)


def _read_page(url: str, path: str) -> str:
    """Read a page of the server, bypassing proxies. Raises ValueError."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with build_opener(ProxyHandler({})).open(Request(url + path, headers=headers), timeout=_TIMEOUT_S) as page:
            text: bytes = page.read()
        return text.decode("utf-8", "replace")
    except (ValueError, OSError) as error:
        raise ValueError(f"--endpoint {url}: {path}: {getattr(error, 'reason', error)}") from error
