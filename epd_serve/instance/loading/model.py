"""The model of an instance, as its stages need it: computed from a checkpoint, or emulated from its shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from device.base import BareDevice
from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.config.model_files import check_max_model_len
from epd_serve.engine.computing import KVCacheMemory, Runner
from epd_serve.engine.pace.measurements import Measurements
from epd_serve.instance.feature_receiver import FeatureForm
from epd_serve.instance.text.prompt import PromptProcessor
from epd_serve.instance.text.request_processor import Place
from epd_serve.protocol import wire
from epd_serve.sched.step_sizes import StepShape
from epd_serve.transfer.feature_store import FeatureStore, StoreObserver
from epd_serve.transfer.transport import Transport
from epd_serve.types import Grammar

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance
    from epd_serve.models.family import Family


class Tower(Protocol):
    """Makes features of pictures.

    Attributes:
        pixel_bytes: memory that a batch takes for each pixel, as far as is known when it is loaded; 0: unknown.
    """

    num_parameters: int
    pixel_bytes: float

    def encode(self, batch: Sequence[Any], *, on_device: bool = False) -> list[Any]:
        """One feature for each picture's inputs, in order: an array [tokens, width], on the host or the device."""
        ...


class Decoders(Protocol):
    """Turn media files into the tower's inputs, in processes of their own where the model needs some."""

    def start(self) -> None: ...

    def close(self) -> None: ...


#: An item's file, what it is, and the place that it takes → the tower's inputs. Raises InvalidRequest.
Prepare = Callable[[bytes, wire.MediaRef, Place], Awaitable[Any]]


def tensor_data(feature: Any) -> Any:
    """The bytes of a tensor: a memoryview of the host, or [nbytes] uint8 on its device."""
    import torch

    data = feature.view(torch.uint8).reshape(-1)
    return data.numpy().data if data.device.type == "cpu" else data


class Compiler(Protocol):
    """Compiles grammars for the sequences that follow them."""

    async def compile(self, grammar: Grammar, *, is_tried: bool = False) -> Any:
        """Return a constraint. ``is_tried``: another instance has compiled it. Raises InvalidRequest."""
        ...


class Language(Protocol):
    """The language model of an instance, which it keeps from one role to the next: weights, texts, KV memory.

    Attributes:
        max_model_len: of a sequence that is alone here; known after :meth:`prepare`.
        num_parameters: of the weights that are held.
    """

    prompts: PromptProcessor
    eos_token_ids: frozenset[int]
    max_model_len: int
    num_parameters: int

    @property
    def memory(self) -> KVCacheMemory: ...

    @property
    def layout(self) -> wire.KVLayout: ...

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in all layers on the device."""
        ...

    @property
    def feature_form(self) -> FeatureForm: ...

    def prepare(self, instance: Instance) -> Runner:
        """KV memory, and graphs where the role decodes. Raises ValueError for a model that cannot be served so."""
        ...

    def step_seconds(self, runner: Any) -> Callable[[StepShape], float]:
        """Times steps of the runner that was prepared last, while nothing else uses the KV pool."""
        ...

    def compiler(self, instance: Instance) -> Compiler:
        """Compiles grammars for the sequences that follow them."""
        ...

    def forget(self, transport: Transport) -> None:
        """Give the KV memory back. Nobody may be about to write there."""
        ...

    def close(self) -> None:
        """Give pinned memory back. Blocks."""
        ...


class InstanceModel(Protocol):
    """The model of one instance, opened for its device.

    Attributes:
        location: what ``/info`` says of where it is from.
        dtype: of weights and features. fingerprint: of what the tower makes of media.
        producer: of features: kind of device and operators; "" where nothing is computed.
        feature_token_bytes: of a picture's token.
        prepare: makes the tower's inputs of a media file. data_of: the bytes of a feature.
        max_positions: longest context that the model allows.
    """

    location: str
    dtype: str
    fingerprint: str
    producer: str
    feature_token_bytes: int
    max_positions: int

    @property
    def family(self) -> Family: ...

    @property
    def decoders(self) -> Decoders: ...

    @property
    def prepare(self) -> Prepare: ...

    @property
    def data_of(self) -> Callable[[Any], Any]: ...

    def tower(self, before_layer: Callable[[], None]) -> Any:
        """Load the tower; ``before_layer`` is called before each of its layers. Blocks."""
        ...

    def linked(self, transport: Transport) -> Transport:
        """The transport over the links of the model's device."""
        ...

    def feature_store(
        self, options: InstanceOptions, host: FeatureStore, transport: Transport, observe: StoreObserver
    ) -> FeatureStore:
        """The store on the model's device, over one on the host; that one where the device is the host. Blocks."""
        ...

    def measurements(self) -> Measurements:
        """The known measurements of an instance like this one, in this user's cache."""
        ...

    def encode_seconds(self, tower: Any, num_images: int) -> float:
        """The time to encode square images of 448 pixels."""
        ...

    def language(self, instance: Instance) -> Language:
        """Load the language model. Blocks as long as that takes. Raises ValueError where it cannot be served."""
        ...


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


def prepare_process(options: InstanceOptions) -> None:
    """Set the libraries of this process up that compute; it has no threads yet."""
    if isinstance(options.model, ShapeConfig):
        return
    from epd_serve.instance.loading.checkpoint import set_up

    set_up(options.threads)
