"""Whether another producer's features are this instance's: one picture encoded by both, and compared.

A producer is a kind of device with a set of operators. Its features are let in once it has shown what it makes of
a fixed picture: shape and dtype are exact, and the numbers lie within bounds that depend on the dtype. What an
instance's own producer makes needs no proof, so a deployment on devices of one kind compares nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from epd_serve.errors import PRODUCER_UNKNOWN, InstanceFailed, ServeError
from epd_serve.instance.feature_receiver import Feature, tensor_of
from epd_serve.protocol import wire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from epd_serve.models.family import Family

logger = logging.getLogger(__name__)

Parity = Literal["warn", "refuse", "off"]

#: Width and height of the fixed picture.
_SIZE = (112, 84)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on two features of one picture (docs/design/mixed-vendors.md).

    Attributes:
        cosine: least cosine of a token with its counterpart.
        error: largest norm of the difference, as a fraction of the reference's norm.
        scale: largest deviation from 1 of the factor that fits the one to the other best. Rounding, which has no
            direction, hardly moves it: it shows what ``error`` must let pass in half precision.
    """

    cosine: float
    error: float
    scale: float


BOUNDS = {
    "float32": Bounds(cosine=0.99999, error=2e-3, scale=1e-3),
    "float16": Bounds(cosine=0.9995, error=0.02, scale=3e-3),
    "bfloat16": Bounds(cosine=0.999, error=0.05, scale=5e-3),
}


def fixed_picture() -> NDArray[np.uint8]:
    """[height, width, 3]: smooth, and another gradient in each channel, so that swapped channels show."""
    import numpy as np

    rows, columns = np.mgrid[: _SIZE[1], : _SIZE[0]]
    channels = (rows * 3, 255 - columns * 2, (rows + columns) * 5 % 256)
    return np.stack(channels, axis=-1).astype(np.uint8)


def fixed_inputs(family: Family) -> tuple[Any, int]:
    """The tower's inputs of the fixed picture, and its pixels; of a rising tone where the tower only listens."""
    if family.audio is None or "image" in family.token_ids:
        return family.preprocess(fixed_picture()), _SIZE[0] * _SIZE[1]
    import numpy as np

    seconds = np.arange(family.audio.rate) / family.audio.rate
    return family.audio.inputs(np.sin(2e3 * seconds * (1 + seconds)).astype(np.float32)), _SIZE[0] * _SIZE[1]


def sample_of(producer: str, feature: Any, data: memoryview) -> wire.ParitySample:
    """The feature that ``producer`` makes of the fixed picture."""
    dtype = str(feature.dtype).removeprefix("torch.")
    return wire.ParitySample(producer=producer, shape=list(feature.shape), dtype=dtype, data=bytes(data))


def difference(sample: wire.ParitySample, reference: Feature) -> str:
    """The way in which a sample is not the reference; "" where it is, within the bounds."""
    dtype = str(reference.dtype).removeprefix("torch.")
    if sample.shape != list(reference.shape) or sample.dtype != dtype:
        return f"{sample.shape} {sample.dtype} where {list(reference.shape)} {dtype} is right"
    theirs = tensor_of(bytearray(sample.data), sample.shape, sample.dtype).double()
    ours = reference.double()  # type: ignore[attr-defined]
    dots, norms = (theirs * ours).sum(-1), theirs.norm(dim=-1) * ours.norm(dim=-1)
    cosine = float((dots / norms.clamp(min=1e-30)).min())
    error = float((theirs - ours).norm() / ours.norm())
    scale = float(dots.sum() / ours.square().sum()) - 1
    bounds = BOUNDS[dtype]
    found = f"least cosine of a token {cosine:.6f}, relative error {error:.2g}, scale {scale:+.2%}"
    logger.info("features of %s: %s", sample.producer, found)
    # so written that NaN is a difference
    if cosine >= bounds.cosine and error <= bounds.error and abs(scale) <= bounds.scale:
        return ""
    return f"{found}, and {dtype} allows {bounds.cosine:g}, {bounds.error:g} and {bounds.scale:.1%}"


class ParityGate:
    """Lets features in by their producer.

    Args:
        own: producer of this instance. mode: see ``parity`` in the deployment file.
        encode: this instance's own feature of the fixed picture.
        refused: told the producer of each feature that is not let in.
    """

    def __init__(
        self,
        own: str,
        mode: Parity,
        encode: Callable[[], Awaitable[Feature]],
        refused: Callable[[str], None],
    ) -> None:
        self._own, self._mode, self._encode, self._refused = own, mode, encode, refused
        self._problems: dict[str, str] = {}
        self._one_at_a_time = asyncio.Lock()

    def admit(self, producer: str) -> None:
        """Raise InstanceFailed for a feature that may not come in: with code ``producer_unknown`` until judged.

        Its producer is another.
        """
        if self._mode == "off":
            return
        problem = self._problems.get(producer)
        if problem is None:
            raise InstanceFailed(f"nothing is known here of features by {producer}", code=PRODUCER_UNKNOWN)
        if problem and self._mode == "refuse":
            self._refused(producer)
            raise InstanceFailed(f"features by {producer} are refused here (parity: refuse): {problem}")

    async def judge(self, sample: wire.ParitySample) -> None:
        """Compare a producer's sample with this instance's own feature; once for each producer."""
        async with self._one_at_a_time:
            if sample.producer in self._problems:
                return
            try:
                own = await self._encode()
                problem = await asyncio.to_thread(difference, sample, own)
            except (
                ServeError,
                RuntimeError,
                ValueError,
            ) as error:  # of the tower, which may not fit beside the language model
                problem = f"they cannot be compared: {error}"
            if problem:
                logger.warning("features by %s are not those of %s: %s", sample.producer, self._own, problem)
            self._problems[sample.producer] = problem
