"""All media of a request at one encoder: the baseline for intra-request parallel encoding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.table import InstanceRecord, InstanceTable


class EncoderChoice(Protocol):
    """The part of a :class:`~epd_serve.routing.policy.Policy` that is about encoders."""

    def choose_encoders(
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        items: Sequence[MediaRef],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]: ...


@dataclass(frozen=True)
class Together:
    """Takes a request's items for one item as large as all of them, which goes where ``encoders`` say."""

    encoders: EncoderChoice

    def choose_encoders(
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        items: Sequence[MediaRef],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        if not items:
            return []
        num_pixels = sum(item.width * item.height for item in items)
        whole = MediaRef(mm_hash=items[0].mm_hash, width=num_pixels, height=1)
        [encoder] = self.encoders.choose_encoders(table, prefill, [whole], exclude=exclude)
        return [encoder] * len(items)
