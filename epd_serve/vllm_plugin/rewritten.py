"""D's side of prompts without pixels: a vLLM EC connector that keeps D from encoding what it was not given.

Of a rewritten picture D knows how many tokens it has and where they lie, no more: that is all it needs where P's
KV comes. Where it does not, or D takes a request's blocks away to compute it again later, vLLM would run its
encoder on nothing and die of it: such a request ends with an error in place of that.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from epd_serve.vllm_plugin.feature_figures import CountingConnector

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class RewrittenMediaConnector(CountingConnector):
    """``ec_connector: RewrittenMediaConnector``. It moves nothing."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._described = PlaceholderMetadataResolver(vllm_config.model_config)
        self._counts: Counter[str] = Counter()
        self._unavailable: set[str] = set()

    # ------------------------------------------------------------------ scheduler

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length > num_computed_tokens and self._is_rewritten(feature):
                self._unavailable.add(request.request_id)
                return False
        return True

    def take_unavailable_requests(self) -> set[str]:
        unavailable, self._unavailable = self._unavailable, set()
        self._counts["missing"] += len(unavailable)
        return unavailable

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        return ECConnectorMetadata()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._counts["rewritten"] += sum(map(self._is_rewritten, request.mm_features))
        return False, None

    def take_counts(self) -> Counter[str]:
        counts, self._counts = self._counts, Counter()
        return counts

    def _is_rewritten(self, feature: MultiModalFeatureSpec) -> bool:
        return feature.data is not None and set(feature.data) <= self._described.fields_for(feature.modality)

    # ------------------------------------------------------------------ worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        return

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        return
