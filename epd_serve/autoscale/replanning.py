"""A new plan when the workload has drifted: TriInfer, section 4.4, "Redeploy"."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from epd_serve.autoscale.drift import Drift, DriftDetector, Observed
from epd_serve.autoscale.hook import run_program, tell
from epd_serve.config import DeploymentConfig

logger = logging.getLogger(__name__)

#: As 'epd-serve plan' takes an image of which it knows nothing (EPD-Serve, section 4.1).
_IMAGE_PIXELS = 802 * 652
#: So that requests are served first.
_NICENESS = 10


class _Served(msgspec.Struct):
    """The fields of a line of the access log that a drift shows in."""

    time: str
    status: int
    images: int
    prompt_tokens: int | None
    completion_tokens: int | None
    duration_ms: float


class Replanner:
    """Looks at each served request as the access log has it; a drift has 'epd-serve plan' look at the latest.

    Attributes:
        tokens_per_pixel: of images, as instances say it.
        drifts: that were seen, in plain words.
        plan: the file of the last plan; directories of earlier ones are gone.
        deployment: the flags by which 'epd-serve apply' finds the deployment; (): plans are not applied.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        program: tuple[str, ...] = (sys.executable, "-P", "-m", "epd_serve.cli"),
    ) -> None:
        self._options, self._hook = config.elastic.drift, config.elastic.hook
        limits = {"ttft": config.slo.ttft_ms, "tpot": config.slo.tpot_ms}
        self._slo = ",".join(f"{name}={limit:g}" for name, limit in limits.items() if limit is not None)
        self._program = program
        self.tokens_per_pixel = 0.0
        self._detector = DriftDetector(self._options)
        self._lines: deque[bytes] = deque(maxlen=self._options.num_requests)
        self._drifts: list[Drift] = []
        self._drifted = asyncio.Event()
        self.drifts: list[str] = []
        self.plan: Path | None = None
        self.deployment: tuple[str, ...] = ()

    def put(self, line: bytes) -> None:
        """Take a line of the access log: a request is over. Raises ValueError for anything else."""
        served = msgspec.json.decode(line, type=_Served)
        if not served.prompt_tokens or not served.completion_tokens or served.status != 200:
            return
        self._lines.append(line)
        drifts = self._detector.observe(
            Observed(
                at_s=datetime.fromisoformat(served.time).timestamp() + served.duration_ms / 1e3,
                num_prompt_tokens=served.prompt_tokens,
                num_output_tokens=served.completion_tokens,
                num_images=served.images,
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
        tokens = round(self.tokens_per_pixel * _IMAGE_PIXELS)
        slo = ("--slo", self._slo) if self._slo else ()
        answer = await self._run(
            *("plan", "--workload", f"trace:{trace}", "--devices", str(options.devices), "--all-devices", *slo),
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
        if options.apply and self.deployment:
            done = await self._run("apply", str(plan), "--topology-only", *self.deployment)
            if done is not None:
                logger.info("elastic: the plan is applied: %s", done.decode().replace("\n", "; "))

    async def _run(self, *arguments: str) -> bytes | None:
        """The standard output of epd-serve; None where it failed, which is logged."""
        status, output, words = await run_program((*self._program, *arguments), niceness=_NICENESS)
        if status != 0:
            logger.warning("elastic: epd-serve %s failed: %s", arguments[0], words)
            return None
        return output
