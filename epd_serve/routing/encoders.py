"""The choice of the instances that encode a request's items, and of the segments in which a video is encoded."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from msgspec.structs import replace

from epd_serve.cost.stages import link_between
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable
from epd_serve.types import Stage

#: How much more than the mean an encoder may have to do before its items go elsewhere.
BOUND = 1.25
#: How much more than the mean it may have got lately: new items are as good elsewhere as long as all know where.
EVEN = 1.1
_ROUNDING = 1e-9


@dataclass(frozen=True)
class BoundedHash:
    """The instance to which an item's hash points: equal items of several requests, and of several gateways, meet
    in one place and are encoded once. Another where that one has more than ``bound`` times the mean to do, in
    seconds, or got more than ``even`` times the mean lately (consistent hashing with bounded loads: Mirrokni,
    Thorup, Zadimoghaddam 2018).

    Before that, an instance that is encoding the item right now, or has encoded it lately. Last, where the
    prefill instance has a tower of its own, the item stays there unless that costs more: its queue, the encode,
    and the prompts that wait for it, against the other's queue, encode and the feature's way.

    Both infinite is hashing alone.
    """

    bound: float = BOUND
    even: float = EVEN

    def choose_encoders(
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        items: Sequence[MediaRef],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        candidates = encoders(table, prefill, exclude)
        if not candidates:
            return [prefill] * len(items)
        others = [one for one in candidates if one is not prefill]
        has_tower = len(others) < len(candidates)
        pending = {one.name: one.pending.num_pixels for one in candidates}
        lately = {one.name: one.recent_pixels for one in candidates}
        chosen: list[InstanceRecord] = []
        for item in items:
            mm_hash, record = item.mm_hash, None
            for one in candidates:
                if mm_hash in one.encoding:
                    record = one
                    break
            else:
                if not others:
                    record = prefill
                elif len(others) == 1:
                    record = others[0]
                else:
                    record = self._remote(others, item, pending, lately)
                if others and has_tower:
                    remote_s = _encode_s(record, item, pending) + _transfer_s(record, prefill, item)
                    if _local_s(prefill, item, pending) <= remote_s:
                        record = prefill
                if mm_hash not in record.features:
                    pending[record.name] += item.num_pixels
                    lately[record.name] += item.num_pixels
            chosen.append(record)
        return chosen

    def _remote(
        self,
        others: Sequence[InstanceRecord],
        item: MediaRef,
        pending: dict[str, float],
        lately: dict[str, float],
    ) -> InstanceRecord:
        num_pixels = item.num_pixels
        own = [one.costs.encode_s(num_pixels) for one in others]
        to_do = [one.costs.encode_s(pending[one.name]) for one in others]
        got = [one.costs.encode_s(lately[one.name]) for one in others]
        own_s = sum(own) / len(own)
        to_do_limit, got_limit = _limit(to_do, own_s, self.bound), _limit(got, own_s, self.even)
        keys = [
            (
                item.mm_hash not in one.features,  # it has nothing to do for it, however much else there is
                to_do[index] + own[index] > to_do_limit,
                got[index] + own[index] > got_limit,
                weight(item.mm_hash, one.name),
            )
            for index, one in enumerate(others)
        ]
        return others[keys.index(min(keys))]


def encoders(table: InstanceTable, prefill: InstanceRecord, exclude: Collection[str]) -> list[InstanceRecord]:
    """The ready encoders that can reach P and make features that it can use.

    An encoder of another model revision or processor would make features under names of its own.
    """
    fingerprint = prefill.info.media_fingerprint if prefill.info is not None else None
    return [
        record
        for record in table.ready(Stage.ENCODE)
        if record.name not in exclude
        and prefill.name not in record.cut_off
        and record.info is not None
        and record.info.media_fingerprint == fingerprint
    ]


def _encode_s(record: InstanceRecord, item: MediaRef, pending: dict[str, float]) -> float:
    """Seconds until an item's feature is there, after the pixels that wait before it."""
    own = 0 if item.mm_hash in record.features else item.num_pixels
    return record.costs.encode_s(pending[record.name] + own) if own else 0.0


def _local_s(prefill: InstanceRecord, item: MediaRef, pending: dict[str, float]) -> float:
    """Seconds until an item's feature is there by an encode on P, which also holds up the prompts there."""
    own_s = 0.0 if item.mm_hash in prefill.features else prefill.costs.encode_s(item.num_pixels)
    return _encode_s(prefill, item, pending) + min(own_s, prefill.prefill_s)


def _transfer_s(record: InstanceRecord, prefill: InstanceRecord, item: MediaRef) -> float:
    info = record.info
    assert info is not None, "an encoder has said what it is"
    num_tokens = item.num_pixels * (info.tokens_per_pixel or PRIOR_TOKENS_PER_PIXEL)
    return link_between(record.place, prefill.place).seconds(num_tokens * info.feature_token_bytes)


def _limit(seconds: Sequence[float], own_s: float, bound: float) -> float:
    """Seconds that an encoder may have with the item: ``bound`` times the mean.

    Where that is less than whole items: the number of items that are there if none has more than its share. In any
    case at least the seconds that the least loaded encoder would have.
    """
    mean_s = (sum(seconds) + own_s) / len(seconds)
    limit = max(bound * mean_s, math.ceil(mean_s / own_s - _ROUNDING) * own_s, min(seconds) + own_s)
    return limit * (1 + _ROUNDING)


class EncoderChoice(Protocol):
    """Chooses encoders; changes nothing."""

    def choose_encoders(
        self,
        table: InstanceTable,
        prefill: InstanceRecord,
        items: Sequence[MediaRef],
        *,
        exclude: Collection[str] = (),
    ) -> list[InstanceRecord]:
        """An instance for each of a request's distinct items; ``prefill`` itself where no other is left."""


def weight(key: str, name: str) -> bytes:
    """The weight of a name for a key; the key belongs to the name of the lowest weight (rendezvous hashing)."""
    return blake2b(f"{key} {name}".encode(), digest_size=8).digest()


#: Seconds of a call and of finding a segment in its file, beside a batch of the encoder.
_CALL_S = 0.005


def in_segments(table: InstanceTable, prefill: InstanceRecord, items: Sequence[MediaRef]) -> list[MediaRef]:
    """The items of a request, videos with the number of segments that each is to be encoded in."""
    able = [one for one in encoders(table, prefill, ()) if one.info is not None and one.info.splits_videos]
    num_free = sum(not one.pending.num_pixels for one in able) // len({item.mm_hash for item in items})
    return [
        replace(item, num_segments=_num_segments(able, num_free, item)) if item.modality == "video" else item
        for item in items
    ]


def _num_segments(able: Sequence[InstanceRecord], num_free: int, item: MediaRef) -> int:
    """Those of which the features are there, or are being made; else one for each of ``num_free`` encoders, as
    long as one more saves the request as many seconds as it costs the encoders."""
    most = min(len(able), item.num_pictures)
    for count in range(1, most + 1):
        if all(
            any(part.mm_hash in one.features or part.mm_hash in one.encoding for one in able)
            for part in replace(item, num_segments=count).segments
        ):
            return count

    def seconds(num_pixels: float) -> float:
        return sum(one.costs.encode_s(num_pixels) for one in able) / len(able)

    count, cost_s = 1, _CALL_S + (sum(one.costs.encode.base_s for one in able) / len(able) if able else 0.0)
    while count < min(num_free, most):
        if seconds(item.num_pixels / count) - seconds(item.num_pixels / (count + 1)) < cost_s:
            break
        count += 1
    return count
