"""The model of an instance, as its stages need it: computed from a checkpoint, or emulated from its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from device.base import BareDevice
from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.config.model_files import check_max_model_len

if TYPE_CHECKING:
    from epd_serve.instance.loading.checkpoint import CheckpointModel
    from epd_serve.instance.loading.language_weights import LanguageWeights
    from epd_serve.instance.loading.shape_model import ShapeLanguage, ShapeModel

    #: What every role needs of a model: family, tower, names, sizes. Its ``language`` loads the other part.
    InstanceModel = CheckpointModel | ShapeModel
    #: The language model, which stays from one role to the next: weights, texts, KV memory.
    Language = LanguageWeights | ShapeLanguage


def open_device(options: InstanceOptions) -> BareDevice:
    """The device of an instance. Raises ValueError where it is not there."""
    if isinstance(options.model, ShapeConfig):
        from device.emulated import timed

        return timed.open_device(options.device)
    from device.registry import get_device

    return get_device(options.device)


def open_model(options: InstanceOptions, device: Any) -> InstanceModel:
    """Read what every role needs of a model; ``device``: from :func:`open_device`. Blocks.

    Raises ValueError for one that cannot be served.
    """
    if isinstance(options.model, ShapeConfig):
        from epd_serve.instance.loading.shape_model import ShapeModel

        model: InstanceModel = ShapeModel(options, device)
    else:
        from epd_serve.instance.loading.checkpoint import CheckpointModel

        model = CheckpointModel(options, device)
    if options.max_model_len is not None:
        check_max_model_len(options.max_model_len, model.max_positions)
    return model
