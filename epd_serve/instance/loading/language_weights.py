"""Language model of an instance, which outlives a role switch: weights, tokenizer, KV memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from epd_serve.config import InstanceOptions, decode_graph_sizes
from epd_serve.config.model_files import chat_template
from epd_serve.config.sizes import in_binary_units
from epd_serve.engine.kv_memory import KVMemory, block_nbytes, num_kv_blocks
from epd_serve.engine.pace import StepTimer
from epd_serve.engine.prefill_graphs import prefill_graph_sizes
from epd_serve.engine.sampling.grammar import Grammars
from epd_serve.engine.step import StepRunner
from epd_serve.instance.feature_receiver import FeatureForm
from epd_serve.instance.text.chat_template import ChatTemplate, MediaLiterals
from epd_serve.instance.text.grammar_compiler import GrammarCompiler
from epd_serve.instance.text.prompt import PromptProcessor, Texts
from epd_serve.instance.text.tokenizer import Tokenizer
from epd_serve.models.family import Family
from epd_serve.models.generation_config import read_generation_config
from epd_serve.models.language import LanguageModel
from epd_serve.protocol import wire
from epd_serve.sched.step_sizes import StepShape, prompts_of
from epd_serve.transfer.transport import Transport

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance
    from epd_serve.instance.loading.checkpoint import CheckpointModel


logger = logging.getLogger(__name__)


class LanguageWeights:
    """Weights and KV memory of one instance. The constructor loads the weights.

    Attributes:
        max_model_len: longest sequence that fits if it is alone.
    """

    def __init__(self, model: CheckpointModel, instance: Instance) -> None:
        """Load the weights. Raises ValueError for an unsupported model."""
        options = instance.options
        self._model = model
        self.language = LanguageModel(model.path, model.torch_dtype, model.device)
        self.num_parameters = self.language.num_parameters
        generation = read_generation_config(model.path, model.family.config)
        self.eos_token_ids = generation.eos_token_ids
        texts = read_texts(model.path, model.family, generation.eos_token_ids, options.chat_template)
        assert texts.grammars is not None
        self.compiler = GrammarCompiler(texts.grammars, instance.processor, model.decoders)
        self.prompts = PromptProcessor(
            texts,
            model.family,
            self.language.inner,
            max_model_len=self.language.max_model_len,
            block_size=options.tokens_per_block,
            rates=instance.telemetry.rates,
            generation=generation,
        )
        self._memory: KVMemory | None = None
        self._sized_by: tuple[int | None, ...] | None = None

    @property
    def memory(self) -> KVMemory:
        assert self._memory is not None, "no KV memory: prepare() comes first"
        return self._memory

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers, on the device."""
        return block_nbytes(self.memory.layout)

    @property
    def feature_form(self) -> FeatureForm:
        return FeatureForm(
            dtype=self.memory.layout.dtype,
            width=self.language.feature_width,
            family=self._model.family,
        )

    def step_seconds(self, runner: Any) -> Callable[[StepShape], float]:
        """Return a function that times steps of the last prepared runner. Nothing else may use the KV memory."""
        return self._timer(runner, self.memory.layout, self.memory.num_blocks).seconds

    def _timer(self, runner: StepRunner, layout: wire.KVLayout, num_blocks: int) -> StepTimer:
        return StepTimer(
            runner,
            num_blocks=num_blocks - layout.state_blocks,
            block_size=layout.block_size,
            num_position_axes=self._model.family.num_position_axes,
            state_blocks=layout.state_blocks,
        )

    def _runner(
        self,
        options: InstanceOptions,
        kv: torch.Tensor,
        max_model_len: int,
        graphs: list[int],
        prefills: list[int],
    ) -> StepRunner:
        """Build a runner of steps over ``kv``. ``graphs``: decode graphs by number of sequences; ``prefills``:
        prefill graphs by number of tokens."""
        model = self._model
        return StepRunner(
            self.language,
            model.device,
            kv,
            num_position_axes=model.family.num_position_axes,
            eos_token_ids=self.eos_token_ids,
            graph_sizes=graphs,
            prefill_graph_sizes=prefills,
            max_num_seqs=options.sizes.max_num_seqs,
            max_model_len=max_model_len,
            max_num_tokens=options.sizes.max_num_batched_tokens if options.role.prefills else 0,
        )

    def prepare(self, instance: Instance) -> StepRunner:
        """Allocate KV memory, reusing it if its size is unchanged, and build a runner with graphs for the role."""
        options = instance.options
        run, most = self._model.family.both_ways_tokens, options.sizes.max_num_batched_tokens
        if options.role.prefills and run > most:
            raise ValueError(
                f"max_num_batched_tokens is {most}, but one step must process all {run} tokens of an image, "
                f"which attend to each other in this model; set it to {run} or more"
            )
        if self._memory is None or options.kv_memory_sizes != self._sized_by:
            self.forget(instance.transport)
            self._memory = self._new_memory(instance)
            self._sized_by = options.kv_memory_sizes
        memory = self._memory
        # a sequence must be able to reach its maximum length alone
        self.max_model_len = self.prompts.max_model_len = min(
            options.max_model_len or self._model.max_positions,
            self.language.max_model_len,
            (memory.num_blocks - 1 - memory.layout.state_blocks) * options.tokens_per_block,
        )
        graphs = decode_graph_sizes(options.sizes.max_num_seqs) if options.role.decodes else []
        prefills = prefill_graph_sizes(most) if options.role.prefills else []
        return self._runner(options, memory.tensor, self.max_model_len, graphs, prefills)

    def warm_up(self, runner: Any, max_num_tokens: int) -> None:
        """Run all kinds of steps once, on the engine's thread, before anything uses the KV memory."""
        timer = self._timer(runner, self.memory.layout, self.memory.num_blocks)
        timer.warm_up(self._model.device.ops.compiled_by, max_num_tokens, self.max_model_len)
        num_blocks = self.memory.num_blocks
        for block in range(num_blocks - self.memory.layout.state_blocks, num_blocks):
            self.memory.copy_block(0, block)  # measured steps kept their recurrent state there

    def forget(self, transport: Transport) -> None:
        """Free the KV memory once no process maps it. No writes may be pending. Blocks."""
        if self._memory is not None:
            self._memory.release(transport)
            self._memory = None

    def close(self) -> None:
        """Unpin memory; call it before closing the transport."""
        if self._memory is not None:
            self._memory.unpin()

    def step_bytes(self, options: InstanceOptions, layout: wire.KVLayout) -> int:
        """Measure the peak memory of a step, without weights and KV. Raises ValueError if it does not fit."""
        model, sizes, block_size = self._model, options.sizes, layout.block_size
        longest = min(options.max_model_len or model.max_positions, self.language.max_model_len)
        shapes = [StepShape(chunks=prompts_of(sizes.max_num_batched_tokens, longest))]
        shapes += [StepShape(num_decodes=sizes.max_num_seqs)] if options.role.decodes else []
        num_blocks = 1 + max(shape.num_blocks(block_size) for shape in shapes) + layout.state_blocks
        shape = (layout.num_layers, 2, num_blocks, block_size, layout.num_kv_heads, layout.head_dim)
        kv = torch.zeros(shape, dtype=model.torch_dtype, device=model.device.torch_device)
        timer = self._timer(self._runner(options, kv, longest, [], []), layout, num_blocks)
        in_use = model.device.reset_peak_memory()
        try:
            for one in shapes:
                timer.step(one)()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{model.device.name} lacks memory for the weights and a step of {sizes.max_num_batched_tokens} "
                f"tokens; lower max_num_batched_tokens or max_num_seqs: {error}"
            ) from error
        return model.device.peak_memory() - in_use

    def _new_memory(self, instance: Instance) -> KVMemory:
        options, language = instance.options, self.language
        layout = wire.KVLayout(
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=language.head_dim,
            block_size=options.tokens_per_block,
            dtype=self._model.dtype,
            model=self._model.fingerprint,
            state_blocks=language.state_blocks(options.tokens_per_block),
        )
        device = self._model.device
        num_blocks = num_kv_blocks(
            options,
            layout,
            device.type,
            device.headroom(),
            lambda: self.step_bytes(options, layout) + instance.encoder.batch_bytes(),
        )
        if layout.state_blocks:
            state_bytes = in_binary_units(layout.state_blocks * block_nbytes(layout))
            if num_blocks < layout.state_blocks + 2:
                raise ValueError(
                    f"the recurrent state of one sequence takes {state_bytes}, {layout.state_blocks} of "
                    f"{num_blocks} KV blocks; raise kv_cache_bytes"
                )
            logger.info(
                "the recurrent state of a sequence takes %s, %d of %d KV blocks; prefix caching is off",
                state_bytes,
                layout.state_blocks,
                num_blocks,
            )
        return KVMemory(
            layout,
            num_blocks,
            device,
            instance.transport,
            staging_bytes=options.staging_bytes,
            lease_s=options.peer_timeout_s,
            shares=options.kv_transfer.transport == "auto",
            registers=self._model.are_regions_reached(instance.transport),
        )


def read_texts(
    path: Path, family: Family, eos_token_ids: frozenset[int] = frozenset(), template: Path | None = None
) -> Texts:
    """Load tokenizer, chat template and grammars. ``template``: a file to use as the chat template.

    Raises ValueError for a tokenizer with tokens outside the model's vocabulary, or a template without output.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not tokenizer("a", add_special_tokens=False).input_ids:
        raise ValueError(f"{path}: the tokenizer has no token for a letter; copy its files from the model")
    vocab_size = family.config.get_text_config().vocab_size
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"{path}: vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} "
            "tokens; use the model's own tokenizer"
        )
    if template is not None:
        tokenizer.chat_template = chat_template(path, template)
    literals = MediaLiterals(tokenizer, family.config, family.tokens)
    return Texts(
        tokenizer=Tokenizer(tokenizer),
        template=ChatTemplate(tokenizer, template or path, literals, family.placeholders(tokenizer)),
        grammars=Grammars(tokenizer, eos_token_ids),
    )
