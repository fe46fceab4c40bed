"""``epd-serve render kubernetes --values``: what a cluster has that no deployment file says."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from epd_serve import __version__

_FROZEN = ConfigDict(extra="forbid", frozen=True)


class Resources(BaseModel):
    """A container's requests; its accelerators follow from the topology."""

    model_config = _FROZEN

    cpu: str = "1"
    memory: str = "2Gi"


class Keda(BaseModel):
    """A ScaledObject for each device group."""

    model_config = _FROZEN

    prometheus: str = Field(description="URL that KEDA asks.")
    queued_s: float = Field(default=2.0, gt=0, description="Seconds of queued work of each replica, on average.")
    max_replicas: int = Field(default=4, ge=1, description="Of a device group; its count is the smallest number.")


class InferencePool(BaseModel):
    """An InferencePool of the Gateway API's inference extension, whose endpoints are the gateway's pods."""

    model_config = _FROZEN

    picker: str = Field(description="Service of the endpoint picker.")
    port: int = Field(default=9002, ge=1, le=65535, description="Of that service.")


class Values(BaseModel):
    """The file's keys."""

    model_config = _FROZEN

    name: str = Field(
        default="epd", pattern=r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$", description="What all names begin with."
    )
    namespace: str | None = Field(default=None, description="null: that of 'kubectl apply'.")
    image: str = Field(default=f"epd-serve:{__version__}", description="Of instances.")
    gateway_image: str | None = Field(default=None, description="null: the same.")
    gateways: int = Field(default=1, ge=1, description="Replicas of the gateway.")
    secret: str | None = Field(
        default=None, description="Secret with admin, cluster, api and hf-token, as needed; null: NAME-keys."
    )
    model_claim: str | None = Field(
        default=None, description="PersistentVolumeClaim with model directories; null: NAME-models."
    )
    cache_claim: str | None = Field(
        default=None, description="PersistentVolumeClaim for the hub's cache; null: each pod downloads anew."
    )
    feature_claim: str | None = Field(
        default=None, description="ReadWriteMany claim for vllm.features: file; null: NAME-features."
    )
    shm: str = Field(default="4Gi", description="Size of /dev/shm of an instance's pod.")
    resources: dict[str, Resources] = Field(
        default_factory=dict, description="By device group, as in e, p, d, e-p or gateway."
    )
    accelerators: dict[str, str] = Field(
        default={"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}, description="Names of device plugins."
    )
    spare_devices: bool = Field(
        default=False,
        description="Whether a rollout finds free devices: the old pod then stays until the new is ready.",
    )
    pod_monitor: bool = Field(default=False, description="Whether there is a Prometheus operator.")
    keda: Keda | None = None
    inference_pool: InferencePool | None = None


def load_values(path: Path) -> Values:
    """Raises ValueError that names file, key and fault."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        return Values.model_validate(content or {})
    except ValidationError as error:
        faults = (f"{path}: {'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in error.errors())
        raise ValueError("\n".join(faults)) from error
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
