"""Computing a step on one rank: eagerly, or as a captured graph where it is decodes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from device.base import Device
from epd_serve.models.decoder import StepContext
from epd_serve.models.language import LanguageModel
from epd_serve.worker.commands import CreateCache
from epd_serve.worker.decode_graph import DecodeGraphs
from epd_serve.worker.prompt_logprobs import PromptLogprobs
from epd_serve.worker.step_inputs import Fed, StepInputs, integers, move


class StepExecutor:
    """A rank's share of the language model over its share of the KV.

    Args:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        graph_sizes: decode batch sizes to capture, where the device can; empty: none.
        max_model_len: longest context of a captured step.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: Device,
        kv: Tensor,
        *,
        num_position_axes: int,
        graph_sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        self._model = model
        self._device = device
        self.device = device.torch_device
        self._kv = kv
        self._graphs: DecodeGraphs | None = None
        graphs = device.graph_runner()
        if graph_sizes and graphs.captures and model.capturable:
            self._graphs = DecodeGraphs(
                model,
                device,
                graphs,
                kv,
                num_position_axes=num_position_axes,
                sizes=graph_sizes,
                max_blocks=-(-max_model_len // kv.shape[3]),
            )

    @classmethod
    def for_cache(cls, model: LanguageModel, device: Device, kv: Tensor, cache: CreateCache) -> StepExecutor:
        """Make the executor from the command that the leader sends to all ranks."""
        return cls(
            model,
            device,
            kv,
            num_position_axes=cache.num_position_axes,
            graph_sizes=cache.graph_sizes,
            max_model_len=cache.max_model_len,
        )

    def compute(
        self,
        inputs: StepInputs,
        on_layer: Callable[[int], None] | None = None,
        fed: Fed | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> Tensor:
        """Logits [len(rows), vocab]; the step's K and V are in the cache afterwards.

        Args:
            on_layer: called when a layer's K and V are in the cache, in steps with prefills.
            logprobs: takes those of the inputs' ``scored_rows``, which all ranks compute.
        """
        if self._graphs is not None and self._graphs.fits(inputs):
            return self._graphs.run(inputs, fed)
        target = self.device
        plan = self._device.ops.prepare(inputs.meta(self._kv.shape[3], target), self._model.dtype)
        features, ids = inputs.features, integers(inputs.ids, target)
        if fed is not None:
            fed.put(ids)
        if inputs.scored_rows and logprobs is None:
            logprobs = PromptLogprobs(inputs, target)
        return self._model.forward(
            ids,
            move(inputs.positions, target),
            StepContext(plan=plan, kv=self._kv, on_layer=on_layer),
            integers(inputs.rows, target),
            None if features is None else features.to(target),
            None if features is None else integers(inputs.feature_rows, target),
            logprobs,
        )
