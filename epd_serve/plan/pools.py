"""Read the devices to plan with from ``devices.yaml`` or a line such as ``h200 x 2``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from device.datasheets import DEVICE_SPECS, is_measured, spec_of
from epd_serve.config import DEMO_MODEL, model_path
from epd_serve.config.model_files import HubModel
from epd_serve.cost.profile import Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import HUB_NAMES, KNOWN_SHAPES, ModelShape, shape_of

Kind = Literal["cuda", "npu", "cpu", "emulated"]
#: Prefix of a data sheet's name: the deployment then runs on this machine.
_EMULATED = "emulated:"


class _PoolFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    device: str
    count: Annotated[int, Field(ge=1, le=4096)]
    price: Annotated[float, Field(ge=0)] | None = None
    profile: Path | None = None


class _DevicesFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = ""
    pools: Annotated[list[_PoolFile], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Equal devices.

    Attributes:
        kind: name in deployment files, such as ``npu`` in ``npu:0``.
        price: price per device.
        first: index of the first device among those of its kind.
        measured: measured profile; None: computed from a data sheet.
    """

    device: str
    kind: Kind
    count: int
    price: float
    shape: ModelShape
    first: int = 0
    measured: Profile | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Device names for a deployment file."""
        if self.kind == "cpu":
            return ("cpu",) * self.count
        kind = self.device if self.kind == "emulated" else self.kind
        return tuple(f"{kind}:{self.first + i}" for i in range(self.count))

    def profile(self, tensor_parallel: int) -> Profile:
        """Return the profile for a tensor-parallel width. Raises ValueError for an unmeasured width."""
        if self.measured is None:
            return _analytic_profile(self.shape, self.device, tensor_parallel)
        if self.measured.tensor_parallel != tensor_parallel:
            raise ValueError(
                f"the profile of {self.device} has tensor-parallel width {self.measured.tensor_parallel}, "
                f"not {tensor_parallel}"
            )
        return self.measured

    @property
    def threads(self) -> int | None:
        """Threads of an instance on a CPU, which are the cores of one device; None elsewhere."""
        return self.profile(1).threads if self.kind == "cpu" else None


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Devices to plan with, and the model.

    Attributes:
        model: name for a deployment file: ``demo``, a directory, or a hub name.
        shape_of: model whose sizes the emulated devices use; "" for real devices.
        is_priced: whether all prices are known; otherwise each device costs 1.
    """

    model: str
    pools: tuple[Pool, ...]
    is_priced: bool = False
    shape_of: str = ""

    @property
    def num_devices(self) -> int:
        return sum(pool.count for pool in self.pools)

    def __str__(self) -> str:
        """``2 x h200 and 1 x a100``."""
        return " and ".join(f"{pool.count} x {pool.device}" for pool in self.pools)


@lru_cache(maxsize=64)
def _analytic_profile(shape: ModelShape, device: str, tensor_parallel: int) -> Profile:
    sheet = spec_of(_sheet(device))
    if _kind(device) == "emulated":  # this machine is the host: it launches while the device computes
        sheet = replace(sheet, launch_s=0.0)
    return analytic_profile(shape, sheet, tensor_parallel)


_EXAMPLE = "model: qwen2.5-vl-7b, and pools: with '- {device: a100, count: 8}'"


def read_fleet(devices: str, model: str = "") -> Fleet:
    """Read a file or a line such as ``h200 x 2, a100 x 4``; ``model`` overrides the file's. Raises ValueError."""
    path = Path(devices)
    is_file = path.is_file() or path.suffix in (".yaml", ".yml")
    file = _read_file(path) if is_file else _DevicesFile(pools=_read_line(devices))
    where, here = (f"{path}: ", path.parent) if is_file else (f"--devices {devices}: ", Path())
    model = model or file.model
    if not model:
        raise ValueError(
            f"{where}no model is given; write --model {DEMO_MODEL}, a directory, a hub name, or one of "
            f"{', '.join(KNOWN_SHAPES)}"
        )
    shape = planned_shape(model)
    pools: list[Pool] = []
    used: dict[str, int] = {}
    sheets = [DEVICE_SPECS.get(_sheet(one.device).lower()) for one in file.pools]
    prices = [
        sheet.price if one.price is None and sheet is not None else one.price
        for one, sheet in zip(file.pools, sheets, strict=True)
    ]
    is_priced = None not in prices
    if not is_priced and any(one.price is not None for one in file.pools):
        (lacks, *_) = (one.device for one, price in zip(file.pools, prices, strict=True) if price is None)
        raise ValueError(f"{where}{lacks} lacks a price, which another device has; give one to all or none")
    for one, price in zip(file.pools, prices, strict=True):
        kind = _kind(one.device)
        name = one.device if kind == "emulated" else kind
        if kind == "cpu" and name in used:
            raise ValueError(
                f"{where}there are two cpu pools, but a deployment has one CPU; write one pool whose count is the "
                "number of instances with their own threads"
            )
        device = one.device
        if one.profile is None and kind == "emulated" and is_measured(_sheet(device)):
            one.profile = Path(_sheet(device)).expanduser()
            device = f"{_EMULATED}{(here / one.profile).resolve()}"
        measured = None if one.profile is None else _read_profile(here / one.profile, shape)
        if measured is None and kind == "cpu":
            raise ValueError(f"{where}a cpu needs a measured 'profile:', made by 'epd-serve profile'")
        if measured is None:
            spec_of(_sheet(one.device))
        pools.append(
            Pool(
                device=device,
                kind=kind,
                count=one.count,
                price=1.0 if price is None or not is_priced else price,
                shape=shape,
                first=used.get(name, 0),
                measured=measured,
            )
        )
        used[name] = used.get(name, 0) + one.count
    kinds = {pool.kind for pool in pools}
    if "emulated" not in kinds or model == DEMO_MODEL:
        return Fleet(model=_deployed(model), pools=tuple(pools), is_priced=is_priced)
    if len(kinds) > 1:
        raise ValueError(f"{where}emulated devices cannot be mixed with real ones; plan for one kind")
    times = model if model in KNOWN_SHAPES else _deployed(model)
    return Fleet(model=model, pools=tuple(pools), is_priced=is_priced, shape_of=times)


def _read_file(path: Path) -> _DevicesFile:
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; devices may also be written as 'h200 x 2'") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: invalid YAML: {error}") from error
    try:
        return _DevicesFile.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{path}: {faults}; a file contains {_EXAMPLE}") from error


def _read_line(text: str) -> list[_PoolFile]:
    pools: list[_PoolFile] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\S+)(?:\s+x\s*(\d{1,4}))?", part.strip())
        if match is None or match[2] == "0":
            raise ValueError(f"--devices {text}: {part.strip()!r} is not a device; write 'h200 x 2' or a file")
        pools.append(_PoolFile(device=match[1], count=int(match[2] or 1)))
    return pools


def planned_shape(model: str) -> ModelShape:
    """Return the shape of ``demo``, a directory, a hub name or a known name. Raises ValueError."""
    if model == DEMO_MODEL:
        return shape_of(str(model_path(model)))
    named = HubModel.parse(model)
    if named is not None and model not in HUB_NAMES.values() and not Path(model).exists():
        if (cached := named.cached()) is None:
            known = ", ".join(HUB_NAMES.values())
            raise ValueError(
                f"model {model!r}: unknown sizes; download it with '{named.command}' or name its directory. Known "
                f"without a download: {known}"
            )
        return shape_of(str(cached))
    return shape_of(model)


def _deployed(model: str) -> str:
    """Return a model's name for a deployment file in any directory."""
    if model in KNOWN_SHAPES:
        return HUB_NAMES[model]
    path = Path(model).expanduser()
    if path.exists():
        return str((path if path.is_dir() else path.parent).resolve())
    return model


def _read_profile(path: Path, shape: ModelShape) -> Profile:
    profile = Profile.read(path)
    if profile.num_layers != shape.language.num_kv_layers:
        raise ValueError(
            f"{path} is a profile of {profile.model} with {profile.num_layers} layers; {shape.name} has "
            f"{shape.language.num_kv_layers}: measure it with 'epd-serve profile'"
        )
    return profile


def _sheet(device: str) -> str:
    return device.removeprefix(_EMULATED)


def _kind(device: str) -> Kind:
    name = device.lower()
    if name.startswith("cpu"):
        return "cpu"
    if name.startswith(_EMULATED):
        return "emulated"
    return "npu" if name.startswith(("ascend", "npu")) else "cuda"
