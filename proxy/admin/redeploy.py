"""Planning anew when the workload has drifted: TriInfer, section 4.4, "Redeploy"."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from epd_serve.config import DeploymentConfig
from epd_serve.elastic.drift import Drift, DriftDetector, Observed
from epd_serve.elastic.hook import tell
from epd_serve.routing.table import InstanceTable
from proxy.observe.access_log import line_of
from proxy.observe.trail import Trail

logger = logging.getLogger(__name__)

#: As 'epd-serve plan' takes an image of which it knows nothing (EPD-Serve, section 4.1).
_IMAGE_PIXELS = 802 * 652
#: So that requests are served first.
_NICENESS = 10
_SHOWN = 300


class Redeployer:
    """Looks at each served request as the access log has it; a drift has 'epd-serve plan' look at the latest.

    Args:
        tokens_per_pixel: of images, as instances say it.

    Attributes:
        drifts: that were seen, in plain words.
        plan: the file of the last plan; directories of earlier ones are gone.
        deployment: by which 'epd-serve apply' finds the launcher of this gateway; None: there is none.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        tokens_per_pixel: Callable[[], float],
        program: tuple[str, ...] = (sys.executable, "-P", "-m", "epd_serve.cli"),
    ) -> None:
        self._options, self._hook = config.elastic.drift, config.elastic.hook
        limits = {"ttft": config.slo.ttft_ms, "tpot": config.slo.tpot_ms}
        self._slo = ",".join(f"{name}={limit:g}" for name, limit in limits.items() if limit is not None)
        self._program = program
        self._tokens_per_pixel = tokens_per_pixel
        self._detector = DriftDetector(self._options)
        self._lines: deque[bytes] = deque(maxlen=self._options.num_requests)
        self._drifts: list[Drift] = []
        self._drifted = asyncio.Event()
        self._wall_offset_s = time.time() - time.monotonic()
        self.drifts: list[str] = []
        self.plan: Path | None = None
        self.deployment: str | None = None

    def put(self, trail: Trail) -> None:
        """A request is over."""
        if not trail.prompt_tokens or not trail.output_tokens or trail.status != 200:
            return
        self._lines.append(msgspec.json.encode(line_of(trail, self._wall_offset_s)))
        drifts = self._detector.observe(
            Observed(
                at_s=trail.arrived_s + trail.duration_s,
                num_prompt_tokens=trail.prompt_tokens,
                num_output_tokens=trail.output_tokens,
                num_images=trail.num_images,
            )
        )
        if drifts:
            self._drifts = drifts
            self._drifted.set()

    async def run(self) -> None:
        """Until cancelled; one plan at a time, of what drifted last."""
        with tempfile.TemporaryDirectory(prefix="epd-serve-plan-") as directory:
            while True:
                await self._drifted.wait()
                self._drifted.clear()
                try:
                    await self._answer(self._drifts, Path(directory))
                except OSError as error:  # a full disk, no room for a process
                    logger.error("elastic: the drift is left without a plan: %s", error)

    async def _answer(self, drifts: Sequence[Drift], directory: Path) -> None:
        options = self._options
        words = "; ".join(str(drift) for drift in drifts)
        self.drifts.append(words)
        logger.info("elastic: the workload has drifted: %s", words)
        if self._hook is not None:
            await tell(self._hook, {"event": "drift", "role": None, "reason": words})
        if options.devices is None:
            return
        trace, plan = directory / "trace.jsonl", directory / "plan.yaml"
        trace.write_bytes(b"".join(line + b"\n" for line in self._lines))
        tokens = round(self._tokens_per_pixel() * _IMAGE_PIXELS)
        slo = ("--slo", self._slo) if self._slo else ()
        answer = await self._run(
            *("plan", "--trace", str(trace), "--devices", str(options.devices), *slo),
            *("--image-tokens", str(tokens), "--most", str(options.most)),
            *("--output", str(plan), "--json"),
        )
        if answer is None:
            return
        self.plan = plan
        recommended = f"planned anew: {json.loads(answer)['recommended']}"
        logger.info("elastic: %s", recommended)
        if self._hook is not None:
            text = plan.read_text(encoding="utf-8")
            await tell(self._hook, {"event": "plan", "role": None, "reason": recommended, "plan": text})
        if options.apply and self.deployment is not None:
            done = await self._run("apply", str(plan), "--topology-only", "--gateway", self.deployment)
            if done is not None:
                logger.info("elastic: the plan is applied: %s", done.decode().replace("\n", "; "))

    async def _run(self, *arguments: str) -> bytes | None:
        """The standard output of epd-serve; None where it failed, which is logged."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            with suppress(psutil.Error):
                psutil.Process(process.pid).nice(_NICENESS)
            output, words = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            problem = words.decode(errors="replace").strip()[-_SHOWN:]
            logger.warning("elastic: epd-serve %s failed: %s", arguments[0], problem)
            return None
        return output


def tokens_per_pixel(table: InstanceTable) -> float:
    """As the instances say it, for their model's images; 0 where none has said it yet."""
    return max((one.info.tokens_per_pixel for one in table if one.info is not None), default=0.0)
