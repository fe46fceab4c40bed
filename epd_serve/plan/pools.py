"""The devices that there are to plan with: ``devices.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from device.datasheets import spec_of
from epd_serve.cost.profile import Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import ModelShape, shape_of

Kind = Literal["cuda", "npu", "cpu"]


class _PoolFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    device: str
    count: Annotated[int, Field(ge=1, le=4096)]
    kind: Kind | None = None
    price: Annotated[float, Field(ge=0)] | None = None
    profile: Path | None = None
    per_host: Annotated[int, Field(ge=1)] = 8


class _DevicesFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    pools: Annotated[list[_PoolFile], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Equal devices.

    Attributes:
        kind: as deployment files name them, as in ``npu:0``.
        price: price of one device.
        first: index of the first one among those of its kind.
        measured: the profile that was made there; None: analytic.
    """

    device: str
    kind: Kind
    count: int
    price: float
    shape: ModelShape
    first: int = 0
    per_host: int = 8
    measured: Profile | None = None
    _profiles: dict[int, Profile] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the pool's devices in a deployment file."""
        if self.kind == "cpu":
            return ("cpu",) * self.count
        return tuple(f"{self.kind}:{self.first + i}" for i in range(self.count))

    def profile(self, tensor_parallel: int) -> Profile:
        """The profile for a tensor-parallel width. Raises ValueError for a width that was not measured."""
        if tensor_parallel not in self._profiles:
            self._profiles[tensor_parallel] = self._made(tensor_parallel)
        return self._profiles[tensor_parallel]

    def _made(self, tensor_parallel: int) -> Profile:
        if self.measured is None:
            return analytic_profile(self.shape, spec_of(self.device), tensor_parallel)
        if self.measured.tensor_parallel != tensor_parallel:
            raise ValueError(
                f"the profile of {self.device} is of tensor-parallel width {self.measured.tensor_parallel}, "
                f"not {tensor_parallel}"
            )
        return self.measured

    @property
    def threads(self) -> int | None:
        """The threads of an instance on a CPU, and so the cores of one device; None on other devices."""
        return self.profile(1).threads if self.kind == "cpu" else None

    @property
    def is_analytic(self) -> bool:
        return self.measured is None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The model's name or directory, and the pools."""

    model: str
    pools: tuple[Pool, ...]

    @property
    def num_devices(self) -> int:
        return sum(pool.count for pool in self.pools)


def read_fleet(path: Path) -> Fleet:
    """Raises ValueError that names the file and what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        values = YAML(typ="safe", pure=True).load(text)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no YAML: {error}") from error
    try:
        file = _DevicesFile.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        example = "model: qwen2.5-vl-7b, and pools: with '- {device: a100, count: 8}'"
        raise ValueError(f"{path}: {faults}; a file has {example}") from error
    given = shape_of(file.model)
    pools: list[Pool] = []
    used: dict[Kind, int] = {}
    for one in file.pools:
        measured = Profile.read(path.parent / one.profile) if one.profile is not None else None
        kind = one.kind or _kind(one.device)
        if kind == "cpu" and "cpu" in used:
            raise ValueError(
                f"{path}: there are two pools of kind cpu; a deployment has one CPU: write one pool, whose count "
                "is how many instances have threads of their own"
            )
        spec_price = None if measured is not None else spec_of(one.device).price
        price = one.price if one.price is not None else spec_price
        pools.append(
            Pool(
                device=one.device,
                kind=kind,
                count=one.count,
                price=1.0 if price is None else price,
                shape=given,
                first=used.get(kind, 0),
                per_host=one.per_host,
                measured=measured,
            )
        )
        used[kind] = used.get(kind, 0) + one.count
    return Fleet(model=file.model, pools=tuple(pools))


def _kind(device: str) -> Kind:
    name = device.lower()
    if name.startswith("cpu"):
        return "cpu"
    return "npu" if name.startswith(("ascend", "npu")) else "cuda"
