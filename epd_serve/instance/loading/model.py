"""Open the model of an instance: a checkpoint, or a shape to emulate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device.base import BareDevice
from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.config.model_files import check_max_model_len

if TYPE_CHECKING:
    from epd_serve.engine.emulated.digests import DigestMemory
    from epd_serve.engine.kv_memory import KVMemory
    from epd_serve.instance.loading.checkpoint import CheckpointModel
    from epd_serve.instance.loading.language_weights import LanguageWeights
    from epd_serve.instance.loading.shape_model import ShapeLanguage, ShapeModel

    #: Parts of a model that all roles need: family, tower, names, sizes. Its ``language`` loads the rest.
    InstanceModel = CheckpointModel | ShapeModel
    #: Language model, which outlives a role switch: weights, texts, KV memory.
    Language = LanguageWeights | ShapeLanguage
    KVCacheMemory = KVMemory | DigestMemory


def open_device(options: InstanceOptions) -> BareDevice:
    """Open the device of an instance. Raises ValueError if it is not available."""
    if isinstance(options.model, ShapeConfig):
        from device.emulated import timed

        return timed.open_device(options.device)
    from device.registry import get_device

    return get_device(options.device)


def open_model(options: InstanceOptions, device: Any) -> InstanceModel:
    """Open a model for the device from :func:`open_device`. Blocks. Raises ValueError for an unsupported model."""
    if isinstance(options.model, ShapeConfig):
        from epd_serve.instance.loading.shape_model import ShapeModel

        model: InstanceModel = ShapeModel(options, device)
    else:
        from epd_serve.instance.loading.checkpoint import CheckpointModel

        model = CheckpointModel(options, device)
    if options.max_model_len is not None:
        check_max_model_len(options.max_model_len, model.max_positions)
    return model
