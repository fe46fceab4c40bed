"""The choice of the instances that encode a request's items, and of the segments in which a video is encoded."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from msgspec.structs import replace

from epd_serve.cost.stages import link_between
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable
from epd_serve.types import Stage

#: The work of an encoder, as a multiple of the mean, beyond which its items go elsewhere.
BOUND = 1.25
#: The same for the work that it got lately: new items are as well off elsewhere as long as all gateways agree.
EVEN = 1.1
_ROUNDING = 1e-9


@dataclass(frozen=True)
class BoundedHash:
    """Equal items of several requests, and of several gateways, go to one encoder and are encoded once.

    In this order: an encoder that is encoding the item now; one that has its feature; the one to which the item's
    hash points, or another where that one would have more than ``bound`` times the mean work, in seconds, or has
    got more than ``even`` times the mean lately (consistent hashing with bounded loads: Mirrokni, Thorup,
    Zadimoghaddam 2018). Where P has a tower of its own, the item stays there unless that costs more: P's queue,
    the encode, and the prompts that wait for it, against the other's queue, encode and the feature's transfer.

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
        """Return an instance for each of a request's distinct items; ``prefill`` itself where no other is left."""
        candidates = encoders(table, prefill, exclude)
        if not candidates:
            return [prefill] * len(items)
        others = [one for one in candidates if one is not prefill]
        has_tower = len(others) < len(candidates)
        pending = {one.name: one.pending.num_pixels for one in candidates}
        lately = {one.name: one.recent_pixels for one in candidates}
        chosen: list[InstanceRecord] = []
        for item in items:
            record = next((one for one in candidates if item.mm_hash in one.encoding), None)
            if record is None:
                record = self._by_hash(others, item, pending, lately) if others else prefill
                if others and has_tower:
                    remote_s = _encode_s(record, item, pending) + _transfer_s(record, prefill, item)
                    # an encode on P also delays the prompts there
                    here_s = 0.0 if item.mm_hash in prefill.features else prefill.costs.encode_s(item.num_pixels)
                    if _encode_s(prefill, item, pending) + min(here_s, prefill.prefill_s) <= remote_s:
                        record = prefill
                if item.mm_hash not in record.features:
                    pending[record.name] += item.num_pixels
                    lately[record.name] += item.num_pixels
            chosen.append(record)
        return chosen

    def _by_hash(
        self,
        others: Sequence[InstanceRecord],
        item: MediaRef,
        pending: dict[str, float],
        lately: dict[str, float],
    ) -> InstanceRecord:
        own = [one.costs.encode_s(item.num_pixels) for one in others]
        to_do = [one.costs.encode_s(pending[one.name]) for one in others]
        got = [one.costs.encode_s(lately[one.name]) for one in others]
        own_s = sum(own) / len(own)
        to_do_limit, got_limit = _limit(to_do, own_s, self.bound), _limit(got, own_s, self.even)
        keys = [
            (
                item.mm_hash not in one.features,
                to_do[index] + own[index] > to_do_limit,
                got[index] + own[index] > got_limit,
                weight(item.mm_hash, one.name),
            )
            for index, one in enumerate(others)
        ]
        return others[keys.index(min(keys))]


def encoders(table: InstanceTable, prefill: InstanceRecord, exclude: Collection[str]) -> list[InstanceRecord]:
    """Return the encoders that are up and make features that P can use.

    An encoder of another model revision or processor would make features under names of its own.
    """
    fingerprint = prefill.info.media_fingerprint if prefill.info is not None else None
    return [
        record
        for record in table.ready(Stage.ENCODE)
        if record.name not in exclude and record.info is not None and record.info.media_fingerprint == fingerprint
    ]


def _encode_s(record: InstanceRecord, item: MediaRef, pending: dict[str, float]) -> float:
    """Seconds until an item's feature is there, after the pixels that wait before it."""
    if item.mm_hash in record.features:
        return 0.0
    return record.costs.encode_s(pending[record.name] + item.num_pixels)


def _transfer_s(record: InstanceRecord, prefill: InstanceRecord, item: MediaRef) -> float:
    info = record.info
    assert info is not None, "an encoder has sent its info"
    num_tokens = item.num_pixels * (info.tokens_per_pixel or PRIOR_TOKENS_PER_PIXEL)
    return link_between(record.place, prefill.place).seconds(num_tokens * info.feature_token_bytes)


def _limit(seconds: Sequence[float], own_s: float, bound: float) -> float:
    """Return the seconds that an encoder may have with the item: ``bound`` times the mean.

    Where that is less than whole items: the number of items that are there if none has more than its share. In any
    case at least the seconds that the least loaded encoder would have.
    """
    mean_s = (sum(seconds) + own_s) / len(seconds)
    limit = max(bound * mean_s, math.ceil(mean_s / own_s - _ROUNDING) * own_s, min(seconds) + own_s)
    return limit * (1 + _ROUNDING)


def weight(key: str, name: str) -> bytes:
    """Return the weight of a name for a key; the lowest weight wins the key (rendezvous hashing)."""
    return blake2b(f"{key} {name}".encode(), digest_size=8).digest()


#: Seconds of a call and of finding a segment in its file, beside a batch of the encoder.
_CALL_S = 0.005


def in_segments(table: InstanceTable, prefill: InstanceRecord, items: Sequence[MediaRef]) -> list[MediaRef]:
    """Return the items of a request, each video with the number of segments in which it is to be encoded."""
    able = [one for one in encoders(table, prefill, ()) if one.info is not None and one.info.splits_videos]
    num_idle = sum(not one.pending.num_pixels for one in able) // len({item.mm_hash for item in items})
    return [
        replace(item, num_segments=_num_segments(able, num_idle, item)) if item.modality == "video" else item
        for item in items
    ]


def _num_segments(able: Sequence[InstanceRecord], num_idle: int, item: MediaRef) -> int:
    """Reuse an existing split; else one segment per idle encoder, as long as one more saves the request as many
    seconds as it costs the encoders."""
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
    while count < min(num_idle, most):
        if seconds(item.num_pixels / count) - seconds(item.num_pixels / (count + 1)) < cost_s:
            break
        count += 1
    return count
