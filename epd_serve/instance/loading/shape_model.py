"""Emulate a model from its shape, without weights or torch: ``model: {shape_of: NAME}``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from device.datasheets import emulated_kind
from device.emulated.timed import TimedDevice
from device.emulated.timeline import Faults
from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.config.sizes import MIN_BLOCKS, blocks_in
from epd_serve.cost.roofline import emulated_profile
from epd_serve.cost.shape import ModelShape, shape_of
from epd_serve.engine.emulated.digests import (
    FEATURE_WIDTH,
    LAYER_BYTES,
    DigestMemory,
    DigestRunner,
    DigestTower,
    Feature,
    Held,
    Picture,
)
from epd_serve.engine.pace import IMAGE_SIDE
from epd_serve.errors import InvalidRequest
from epd_serve.instance.feature_receiver import FeatureForm
from epd_serve.instance.text.prompt import PromptProcessor, Texts
from epd_serve.instance.text.request_processor import Place
from epd_serve.instance.text.syllables import (
    END,
    IMAGE,
    NUM_TOKENS,
    SYLLABLES,
    VIDEO,
    NoLogits,
    SyllableTemplate,
    SyllableTokenizer,
)
from epd_serve.instance.text.tokenizer import Tokenizer
from epd_serve.models.family import Family, Size
from epd_serve.protocol import wire
from epd_serve.sched.step_sizes import StepShape
from epd_serve.transfer.feature_store import FeatureStore, StoreObserver
from epd_serve.transfer.shaped import ShapedTransport
from epd_serve.transfer.transport import Transport
from epd_serve.types import SamplingParams

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance

#: Mean tokens of an answer that may end by itself.
MEAN_ANSWER_TOKENS = 200
#: Fraction of the memory left by the weights; activations would need the rest.
_FREE_MEMORY_FOR_KV = 0.8


class ShapeFamily(Family):
    """Family with the real model's number of tokens per image; two video frames count as one image."""

    def __init__(self, shape: ModelShape) -> None:
        self._vision = shape.vision
        self.token_ids = {} if shape.vision is None else {"image": IMAGE, "video": VIDEO}
        self.row_token_ids = self.token_ids

    def parts(self, size: Size) -> Sequence[int | str]:
        if self._vision is None:
            raise InvalidRequest("the model is text-only; remove the images", param="messages")
        try:
            return [self._vision.num_tokens(*size)]
        except ValueError as error:
            raise InvalidRequest(f"an image of {size[0]}x{size[1]} pixels cannot be used: {error}") from error

    def num_tokens(self, item: wire.MediaRef) -> int:
        return item.num_pictures * self.num_image_tokens((item.width, item.height))

    def video_parts(self, item: wire.MediaRef) -> Sequence[int | str]:
        return (self.num_tokens(item),)

    def pixels_of(self, item: wire.MediaRef) -> int:
        return item.num_pictures * self.num_pixels((item.width, item.height))

    def num_pixels(self, size: Size) -> int:
        self.parts(size)
        assert self._vision is not None
        width, height = self._vision.resized(*size)
        return width * height

    def blank_inputs(self, size: Size) -> Any:
        return Picture("", self.num_image_tokens(size), self.num_pixels(size))

    def positions(self, ids: Sequence[int], items: Sequence[wire.MediaRef], model: Any) -> Any:
        return (), 0


class ShapeModel:
    """Emulation of a :class:`~epd_serve.instance.loading.checkpoint.CheckpointModel` by its sizes.

    Attributes:
        time: device times for this shape; the host's work is real.
    """

    dtype = "bfloat16"
    producer = ""
    decoders = None  # no file is decoded

    def __init__(self, options: InstanceOptions, device: TimedDevice) -> None:
        assert isinstance(options.model, ShapeConfig)
        self.shape = shape_of(options.model.shape_of)
        if self.shape.language.vocabulary < NUM_TOKENS:
            raise ValueError(
                f"shape_of {self.shape.name}: the vocabulary has {self.shape.language.vocabulary} tokens, but "
                f"emulated answers need {NUM_TOKENS}"
            )
        self.device, self.options = device, options
        self.measured: dict[str, float] = {}
        self.profile = emulated_profile(options.model.shape_of, emulated_kind(options.device))
        self.family = ShapeFamily(self.shape)
        self.location = f"the shape of {self.shape.name}, without weights"
        self.fingerprint = blake3(f"epd-serve shape 1 {self.shape}".encode()).hexdigest()
        self.feature_token_bytes = self.shape.feature_token_bytes
        self.max_positions = self.shape.max_positions

    def tower(self, before_layer: Callable[[], None]) -> DigestTower:
        assert self.shape.vision is not None
        return DigestTower(
            self.profile,
            self.device,
            num_layers=self.shape.vision.num_layers,
            num_parameters=self.shape.vision.parameters,
            before_layer=before_layer,
        )

    def linked(self, transport: Transport) -> Transport:
        block_bytes = LAYER_BYTES * self.shape.language.num_layers
        scales = {
            "kv": self.shape.kv_token_bytes * self.options.tokens_per_block / block_bytes,
            "features": self.feature_token_bytes / FEATURE_WIDTH,
        }
        profile, faults = self.profile, Faults.of_environment()
        link = profile.link_bytes_per_s, profile.handshake_s
        return ShapedTransport(transport, *link, scales=scales, faults=faults)

    async def prepare(self, media: bytes, ref: wire.MediaRef, place: Place) -> Picture:
        """Return inputs from the item's name and size, without decoding the file."""
        return Picture(ref.mm_hash, self.family.num_tokens(ref), self.family.pixels_of(ref), ref.num_pictures)

    def data_of(self, feature: Feature) -> memoryview:
        return memoryview(feature.data)

    def feature_store(
        self, options: InstanceOptions, host: FeatureStore, transport: Transport, observe: StoreObserver
    ) -> FeatureStore:
        return host

    def encode_seconds(self, tower: Any, num_images: int) -> float:
        return self.profile.encode_s([self.family.num_pixels((IMAGE_SIDE, IMAGE_SIDE))] * num_images)

    def language(self, instance: Instance) -> ShapeLanguage:
        return ShapeLanguage(self, instance)


class DigestForm(FeatureForm):
    def read(self, data: bytearray, shape: Sequence[int], dtype: str) -> Feature:
        if len(shape) != 2 or shape[0] * shape[1] != len(data):
            raise ValueError(f"a feature of {len(data)} bytes has shape {list(shape)}")
        return Feature(data, (shape[0], shape[1]), dtype)


class ShapeLanguage:
    """Emulated language model: texts of syllables, digests as KV, hashes as tokens."""

    eos_token_ids = frozenset({END})
    compiler = None  # emulated answers cannot follow a grammar

    def __init__(self, model: ShapeModel, instance: Instance) -> None:
        options = instance.options
        self._model, self._device = model, model.device
        self._weights = Held(self._device, int(model.profile.language_bytes))
        self.num_parameters = model.shape.language.parameters
        self.max_model_len = options.max_model_len or model.max_positions
        self.prompts = PromptProcessor(
            Texts(tokenizer=Tokenizer(SyllableTokenizer()), template=SyllableTemplate(), grammars=None),
            model.family,
            None,
            max_model_len=self.max_model_len,
            block_size=options.tokens_per_block,
            rates=instance.telemetry.rates,
            generation=NoLogits(eos_token_ids=self.eos_token_ids),
        )
        self._memory: DigestMemory | None = None
        self._sized_by: tuple[int | None, ...] | None = None

    @property
    def memory(self) -> DigestMemory:
        assert self._memory is not None, "no KV memory: prepare() comes first"
        return self._memory

    @property
    def block_nbytes(self) -> int:
        return self.memory.nbytes(self.memory.layout.num_layers, 1)

    @property
    def feature_form(self) -> FeatureForm:
        return DigestForm(dtype="uint8", width=FEATURE_WIDTH, family=self._model.family)

    def prepare(self, instance: Instance) -> DigestRunner:
        options = instance.options
        if self._memory is None or options.kv_memory_sizes != self._sized_by:
            self.forget(instance.transport)
            self._memory = self._new_memory(instance.options, instance.transport)
            self._sized_by = options.kv_memory_sizes
        # a sequence must be able to reach its maximum length alone
        self.max_model_len = self.prompts.max_model_len = min(
            options.max_model_len or self._model.max_positions,
            (self._memory.num_blocks - 1) * options.tokens_per_block,
        )
        return DigestRunner(self._memory, self._device, self._model.profile, next_token)

    def step_seconds(self, runner: Any) -> Callable[[StepShape], float]:
        return lambda shape: runner.cost(shape.work)[0]

    def warm_up(self, runner: Any, max_num_tokens: int) -> None:
        """Do nothing: emulated devices load no kernels."""

    def forget(self, transport: Transport) -> None:
        if self._memory is not None:
            transport.release(self._memory.slab)
            self._memory = None

    def close(self) -> None:
        pass

    def _new_memory(self, options: InstanceOptions, transport: Transport) -> DigestMemory:
        language, block_size = self._model.shape.language, options.tokens_per_block
        layout = wire.KVLayout(
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=language.head_dim,
            block_size=block_size,
            dtype=self._model.dtype,
            model=self._model.fingerprint,
        )
        token_bytes = self._model.shape.kv_token_bytes
        block_bytes = token_bytes * block_size
        if options.num_blocks is not None:
            num_blocks = options.num_blocks
        elif options.kv_cache_bytes is not None:
            num_blocks = blocks_in(options.kv_cache_bytes, block_bytes=block_bytes, block_size=block_size)
        else:
            num_blocks = max(int(self._device.headroom() * _FREE_MEMORY_FOR_KV) // block_bytes, MIN_BLOCKS)
        staging_bytes = options.staging_bytes
        return DigestMemory(layout, num_blocks, self._device, transport, token_bytes, staging_bytes)


def next_token(chain: bytes, sampling: SamplingParams, index: int, number: int) -> int:
    """Return the token that follows the digest of all tokens before it; if not greedy, also hash seed and choice.

    If the answer may end, one in ``MEAN_ANSWER_TOKENS`` tokens ends it.
    """
    drawn = "" if sampling.greedy else f"{sampling.seed} {index}"
    found, end = divmod(int.from_bytes(blake3(chain + drawn.encode()).digest(8)), MEAN_ANSWER_TOKENS)
    may_end = not sampling.ignore_eos and number >= sampling.min_tokens
    return END if may_end and not end else SYLLABLES[found % len(SYLLABLES)]
