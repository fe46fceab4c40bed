"""The instances' processes of a deployment with ``engine: vllm``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from device import mps
from device.present import visibility
from epd_serve import lifeline
from epd_serve.backends.vllm_command import (
    Connectors,
    VllmOptions,
    command_of,
    environment_of,
    roles_of,
    takes_features,
)
from epd_serve.config import DeploymentConfig, InstanceSettings, model_path
from epd_serve.config.shares import DeviceShare
from epd_serve.config.sizes import StepSizes
from epd_serve.config.vllm import connectors, pulls
from epd_serve.launch.commands import hccl_variables, threads_of
from epd_serve.launch.processes.process import ProcessSpec
from epd_serve.launch.vllm.installed import STORE, VllmFound, check_found, find_vllm
from epd_serve.protocol.addresses import is_loopback, url_of
from epd_serve.rpc.tls import tls_files
from epd_serve.topology import InstancePlacement
from epd_serve.topology.placement import CPU
from epd_serve.types import Role, Stage

Kind = Literal["cpu", "cuda", "npu"]
#: Keys of ``instances`` and the flags of vllm serve that mean the same.
_SAME = {
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "num_blocks": "num_gpu_blocks_override",
}
#: Of a device's memory where nothing else is said, as vLLM's own default.
_ALL_MEMORY = 0.92
_GRACE_S = 10.0
#: Names the directory that E and P of several machines share, where they hand features on as files.
FEATURE_DIR = "EPD_SERVE_FEATURE_DIR"


@dataclass(frozen=True, kw_only=True)
class VllmProcess:
    """The process of one instance; in a launcher's eyes as :class:`~epd_serve.launch.commands.PreparedInstance`.

    Attributes:
        own: variables besides those that follow from ``options``.
        chose_threads, chose_memory: whether these merely follow from how many instances there are.
    """

    placement: InstancePlacement
    options: VllmOptions
    own: Mapping[str, str]
    chose_threads: bool
    chose_memory: bool

    @property
    def command(self) -> tuple[str, ...]:
        return command_of(self.options)

    @property
    def variables(self) -> dict[str, str]:
        return {**environment_of(self.options), **hccl_variables(self.placement), **self.own}

    @property
    def roles(self) -> frozenset[Role]:
        return roles_of(self.options.role, self.options.connectors)

    @property
    def kind(self) -> Hashable:
        """All that the process keeps for as long as it lives."""
        options = replace(self.options, name="", port=0, number=0)
        if self.chose_threads:
            options = replace(options, threads=0)
        if self.chose_memory:
            options = replace(options, memory_share=None)
        alike = replace(self, options=options, placement=replace(self.placement, index=0))
        return self.placement.devices, alike.command, tuple(sorted(alike.variables.items()))

    #: All of them are in its command.
    settings: ClassVar[None] = None

    def switched(self, role: Role, settings: InstanceSettings) -> VllmProcess:
        return replace(self, options=replace(self.options, role=role))

    def spec(self, config: DeploymentConfig, environment: Mapping[str, str]) -> ProcessSpec:
        options, devices = self.options, self.placement.devices
        # As a script it loads nothing else, of which its waiting half would keep a copy.
        tie = (sys.executable, "-IS", lifeline.__file__, "--group", str(os.getpid()))
        return ProcessSpec(
            name=options.name,
            label=f"{options.role} on {', '.join(dict.fromkeys(devices))}, vLLM",
            command=(*tie, *self.command),
            environment={**environment, **self.variables},
            url=url_of(options.host, options.port, tls=tls_files(environment) is not None),
            grace_s=_GRACE_S,
            is_group=True,
            measures=frozenset(devices) - {CPU} if options.kv_bytes is None else frozenset(),
        )


def connectors_of(config: DeploymentConfig, feature_dir: str = "") -> Connectors:
    """Return the connectors that the topology needs; ``feature_dir`` is the directory of ``file``."""
    vllm = config.vllm
    prefill = config.settings_for("P")
    features, kv = connectors(config.placement(), vllm)
    return Connectors(
        features=features,
        kv=kv,
        pulls=pulls(config.placement(), kv),
        feature_dir=feature_dir,
        store_bytes=config.settings_for("E").feature_cache_bytes or StepSizes().feature_cache_bytes,
        cache_bytes=prefill.feature_cache_bytes or StepSizes().feature_cache_bytes,
        feature_timeout_s=prefill.feature_timeout_s,
        widths=(_width(config, Stage.PREFILL), _width(config, Stage.DECODE)),
    )


def vllm_processes(
    config: DeploymentConfig,
    placement: Sequence[InstancePlacement],
    ports: Sequence[int],
    environment: Mapping[str, str],
    plugin_path: str = "",
    feature_dir: str = "",
    *,
    found: Mapping[str, VllmFound] | None = None,
    model: str | None = None,
) -> list[VllmProcess]:
    """The processes of ``placement``, the instances of one machine, in its order; ``ports`` are theirs.

    ``plugin_path`` is a directory from which a Python without epd_serve can import it; E and P share
    ``feature_dir`` where they hand features on as files. ``found`` is what is known of the vLLM of each
    interpreter. ``model`` is the model's directory where it need not be on this machine.
    Raises ValueError where the model must be here and is not.
    """
    model = model or str(model_path(config.checkpoint))
    used = connectors_of(config, feature_dir)
    num_ranks = sum(instance.tensor_parallel for instance in placement)
    shares = config.device_shares(placement)
    processes = []
    for instance, port in zip(placement, ports, strict=True):
        share, settings = shares.get(instance.name), config.settings_for(str(instance.role))
        engine = (found or {}).get(config.vllm.python_of(str(instance.role)))
        media = media_flags(Path(model)) if engine is not None and engine.release >= STORE else {}
        threads = threads_of(instance, settings, num_ranks, environment, share)
        options = _options(config, settings, instance, port, used, environment, threads, share, model, media)
        own = {}
        if used.kv == "nixl" and is_loopback(options.host):
            own["UCX_NET_DEVICES"] = "lo"  # it would listen on every interface
        if plugin_path and engine is not None and not engine.epd_serve:
            own["PYTHONPATH"] = plugin_path
        if share is not None and options.kind == "cuda":
            own |= mps.share_variables(share.share)
        processes.append(
            VllmProcess(
                placement=instance,
                options=options,
                own=own,
                chose_threads=settings.threads is None and share is None,
                chose_memory=settings.memory_share is None and share is None,
            )
        )
    return processes


def prepare_vllm(
    config: DeploymentConfig,
    placement: Sequence[InstancePlacement],
    ports: Sequence[int],
    environment: Mapping[str, str],
    directory: Path,
    engines: dict[str, VllmFound],
) -> list[VllmProcess]:
    """The processes in placement order, after a check of the vLLM in their environment.

    ``directory`` takes the files that another Python needs to find epd_serve; ``engines`` what is known of the
    vLLM of each interpreter. Raises ValueError that names what is missing.
    """
    found = check_engines(config, engines)
    has_all = all(one.epd_serve for one in found.values())
    plugin_path = "" if has_all else link_plugin(directory / "plugin")
    feature_dir = environment.get(FEATURE_DIR) or str(directory / "features")
    return vllm_processes(config, placement, ports, environment, plugin_path, feature_dir, found=found)


def check_engines(config: DeploymentConfig, known: dict[str, VllmFound] | None = None) -> dict[str, VllmFound]:
    """The vLLM of each interpreter that a deployment will run on; those that are ``known`` are not asked again.

    Raises ValueError where one cannot run its instances, NoVllm where there is none.
    """
    engines: dict[str, VllmFound] = {}
    for python in dict.fromkeys(config.vllm.python_of(str(one.role)) for one in config.placement()):
        engines[python] = found = (known or {}).get(python) or find_vllm(python)
        instances = [one for one in config.placement() if config.vllm.python_of(str(one.role)) == python]
        used = {name for one in instances for name in _handed_on(one, connectors_of(config))}
        kinds = {_kind(device) for one in instances for device in one.devices}
        needs = [*sorted(used - {"file"}), *(["vllm_ascend"] if "npu" in kinds else [])]
        check_found(found, python=python, needs=needs)
        if known is not None:
            known[python] = found
    return engines


def engine_names(engines: Mapping[str, VllmFound]) -> str:
    """As in ``vLLM 0.23.0, vllm-ascend 0.23.0 and vLLM 0.33.0``."""
    names = (
        f"vLLM {one.vllm}" + (f", vllm-ascend {one.vllm_ascend}" if one.vllm_ascend else "")
        for one in engines.values()
    )
    return " and ".join(dict.fromkeys(names))


def _handed_on(instance: InstancePlacement, used: Connectors) -> Iterator[str]:
    """The connectors of one instance, as a deployment file names them."""
    role = instance.role
    holds_both = used.holds_both and role.has_language_model
    if used.kv is not None and (role.prefills != role.decodes or holds_both):
        yield used.kv
    if used.features is not None and (str(role) == "E" or takes_features(role, used)):
        yield used.features


def _options(
    config: DeploymentConfig,
    settings: InstanceSettings,
    instance: InstancePlacement,
    port: int,
    used: Connectors,
    environment: Mapping[str, str],
    threads: int,
    share: DeviceShare | None,
    model: str,
    defaults: Mapping[str, bool],
) -> VllmOptions:
    kind = _kind(instance.devices[0])
    shown, _ = visibility(instance.devices, environment)
    given: dict[str, Any] = {
        flag: getattr(settings, key)
        for key, flag in _SAME.items()
        if key in settings.model_fields_set and getattr(settings, key) is not None
    }
    memory = settings.memory_share or (share.share * _ALL_MEMORY if share else None)
    if memory is None and instance.shares_device_with:
        memory = _ALL_MEMORY / (1 + len(instance.shares_device_with))
    return VllmOptions(
        name=instance.name,
        role=instance.role,
        python=config.vllm.python_of(str(instance.role)),
        model=model,
        served_model_name=config.model_name,
        host=config.instances.host,
        port=port,
        number=instance.index,
        kind=kind,
        visible="".join(shown.values()),
        tensor_parallel=instance.tensor_parallel,
        dtype=config.dtype,
        chat_template=config.chat_template,
        memory_share=None if memory is None else round(memory, 3),
        kv_bytes=settings.kv_cache_bytes,
        threads=threads,
        cores=_cores(share) if share is not None and kind == "cpu" else "",
        connectors=used,
        tls=config.read_tls(),
        arguments={**defaults, **given, **settings.engine_args},
    )


def _width(config: DeploymentConfig, stage: Stage) -> int:
    """Tensor-parallel ranks of the widest instance of a stage."""
    return max([one.tensor_parallel for one in config.placement() if stage in one.role.stages], default=1)


def _cores(share: DeviceShare) -> str:
    """The cores of a share, as in ``4,5,6``."""
    cores = sorted(os.sched_getaffinity(0))
    first = min(len(cores) - 1, round(share.start * len(cores)))
    return ",".join(map(str, cores[first : first + max(1, round(share.share * len(cores)))]))


def _kind(device: str) -> Kind:
    return cast(Kind, device.partition(":")[0])


def link_plugin(directory: Path) -> str:
    """Make ``directory`` one from which another Python can import epd_serve and no more; returns it."""
    import device
    import epd_serve

    directory.mkdir(parents=True, exist_ok=True)
    for package in (epd_serve, device):
        assert package.__file__ is not None
        link, source = directory / package.__name__, Path(package.__file__).resolve().parent
        if link.is_symlink() and link.readlink() != source:  # of an installation that was here before
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(source)
    # With it vLLM finds the plugin as that of an installed package.
    facts = directory / f"epd_serve-{epd_serve.__version__}.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: epd-serve\nVersion: {epd_serve.__version__}\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nepd_serve = epd_serve.vllm_plugin:register\n")
    return str(directory)


_KEYS = ("do_normalize", "do_rescale", "image_mean", "image_std")


def media_flags(model: Path) -> dict[str, bool]:
    """Return flags of vllm serve: it takes a request's options of media, for which the gateway has limits, and
    transformers normalises pixels where the model's files do not say how."""
    found = {"trust_request_mm_kwargs": True}
    image_processor = _read(model / "preprocessor_config.json")
    processor = _read(model / "processor_config.json").get("image_processor") or {}
    told = any(key in image_processor or key in processor for key in _KEYS)
    if (image_processor or processor) and not told:
        found["mm_device_do_normalize"] = False
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
