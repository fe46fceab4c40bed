"""The choice of encoders for a request's items, and the number of segments of a video."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from hashlib import blake2b

from msgspec.structs import replace

from epd_serve.cost.stages import NETWORK, link_between
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.table import PRIOR_TOKENS_PER_PIXEL, InstanceRecord, InstanceTable
from epd_serve.types import Stage

#: Limit of an encoder's pending work, as a multiple of the mean.
BOUND = 1.25
#: Limit of an encoder's recent work, as a multiple of the mean.
EVEN = 1.1
_ROUNDING = 1e-9


def choose_encoders(
    table: InstanceTable, prefill: InstanceRecord, items: Sequence[MediaRef], *, exclude: Collection[str] = ()
) -> list[InstanceRecord]:
    """Return an instance for each distinct item, ``prefill`` itself without an encoder.

    Equal items, from any request or gateway, go to one encoder, which encodes them once. In this order: an encoder
    at work on the item; one that stores its feature; the one that the item's hash selects, unless it exceeds BOUND
    times the mean pending work or EVEN times the mean recent work, both in seconds (consistent hashing with
    bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018). If P has a tower, it keeps the item unless its queue, the
    encode and the delay of its prompts cost more than the encoder's queue, the encode and the feature transfer.
    """
    candidates = find_encoders(table, prefill, exclude)
    if not candidates:
        return [prefill] * len(items)
    others = [one for one in candidates if one is not prefill]
    has_tower = len(others) < len(candidates)
    pending = {one.name: one.pending.num_pixels for one in candidates}
    recent = {one.name: one.recent_pixels for one in candidates}
    chosen: list[InstanceRecord] = []
    for item in items:
        record = next((one for one in candidates if item.mm_hash in one.encoding), None)
        if record is None:
            record = _choose_by_hash(others, item, pending, recent) if others else prefill
            if others and has_tower:
                info = record.info
                assert info is not None
                num_tokens = item.num_pixels * (info.tokens_per_pixel or PRIOR_TOKENS_PER_PIXEL)
                link = link_between(record.place, prefill.place)
                remote_s = _encode_s(record, item, pending) + link.seconds(num_tokens * info.feature_token_bytes)
                # an encode on P also delays the prompts there
                here_s = 0.0 if item.mm_hash in prefill.features else prefill.costs.encode_s(item.num_pixels)
                if _encode_s(prefill, item, pending) + min(here_s, prefill.prefill_s) <= remote_s:
                    record = prefill
            if item.mm_hash not in record.features:
                pending[record.name] += item.num_pixels
                recent[record.name] += item.num_pixels
        chosen.append(record)
    return chosen


def _choose_by_hash(
    others: Sequence[InstanceRecord], item: MediaRef, pending: dict[str, float], recent: dict[str, float]
) -> InstanceRecord:
    own = [one.costs.encode_s(item.num_pixels) for one in others]
    pending_s = [one.costs.encode_s(pending[one.name]) for one in others]
    recent_s = [one.costs.encode_s(recent[one.name]) for one in others]
    own_s = sum(own) / len(own)
    pending_limit, recent_limit = _limit(pending_s, own_s, BOUND), _limit(recent_s, own_s, EVEN)
    keys = [
        (
            item.mm_hash not in one.features,
            pending_s[index] + own[index] > pending_limit,
            recent_s[index] + own[index] > recent_limit,
            weight(item.mm_hash, one.name),
        )
        for index, one in enumerate(others)
    ]
    return others[keys.index(min(keys))]


def find_encoders(table: InstanceTable, prefill: InstanceRecord, exclude: Collection[str]) -> list[InstanceRecord]:
    """Return the ready encoders that share P's model revision and processor, and so its mm_hashes."""
    fingerprint = prefill.info.media_fingerprint if prefill.info is not None else None
    return [
        record
        for record in table.ready(Stage.ENCODE)
        if record.name not in exclude and record.info is not None and record.info.media_fingerprint == fingerprint
    ]


def _encode_s(record: InstanceRecord, item: MediaRef, pending: dict[str, float]) -> float:
    """Return the seconds until an item's feature is ready, pending work included."""
    if item.mm_hash in record.features:
        return 0.0
    return record.costs.encode_s(pending[record.name] + item.num_pixels)


def _limit(seconds: Sequence[float], own_s: float, bound: float) -> float:
    """Return the limit of an encoder's work with the item: ``bound`` times the mean.

    It is at least a fair share in whole items, and at least the work that the least loaded encoder would have.
    """
    mean_s = (sum(seconds) + own_s) / len(seconds)
    limit = max(bound * mean_s, math.ceil(mean_s / own_s - _ROUNDING) * own_s, min(seconds) + own_s)
    return limit * (1 + _ROUNDING)


def weight(key: str, name: str) -> bytes:
    """Return the weight of a name for a key; the lowest weight wins the key (rendezvous hashing)."""
    return blake2b(f"{key} {name}".encode(), digest_size=8).digest()


#: Seconds of a call and of seeking a segment in its file, in addition to the encode.
_CALL_S = 0.005
#: Most segments for each encoder: P computes the first ones while the next are encoded.
_ROUNDS = 4


def split_videos(
    table: InstanceTable, prefill: InstanceRecord, items: Sequence[MediaRef], num_bytes: Sequence[int]
) -> list[MediaRef]:
    """Return a request's items, with the number of segments to encode set on each video.

    ``num_bytes``: sizes of the items' files; each segment's encoder receives the whole file.
    """
    able = [one for one in find_encoders(table, prefill, ()) if one.info is not None and one.info.splits_videos]
    num_idle = sum(not one.pending.num_pixels for one in able) // len({item.mm_hash for item in items})
    rounds = 1 if any(one.place == prefill.place for one in able) else _ROUNDS  # one device gains nothing
    counts = [
        _num_segments(able, num_idle, rounds, item, size / NETWORK.bytes_per_s) if item.modality == "video" else 1
        for item, size in zip(items, num_bytes, strict=True)
    ]
    return [replace(item, num_segments=count) for item, count in zip(items, counts, strict=True)]


def _num_segments(
    able: Sequence[InstanceRecord], num_idle: int, rounds: int, item: MediaRef, send_s: float
) -> int:
    """Return an existing split; else a segment per idle encoder, then more rounds of them, while more segments
    bring the first feature earlier by more time than they cost."""
    for count in range(1, min(_ROUNDS * len(able), item.num_pictures) + 1):
        parts = map(replace(item, num_segments=count).segment_at, range(count))
        if all(
            any(part.mm_hash in one.features or part.mm_hash in one.encoding for one in able) for part in parts
        ):
            return count

    def seconds(num_pixels: float) -> float:
        return sum(one.costs.encode_s(num_pixels) for one in able) / len(able)

    count, cost_s = 1, _CALL_S + (sum(one.costs.encode.base_s for one in able) / len(able) if able else 0.0)
    most = min(rounds * num_idle, item.num_pictures)
    # whole rounds: no encoder gets more than its share
    while (more := count + (1 if count < num_idle else num_idle)) <= most:
        saved_s = seconds(item.num_pixels / count) - seconds(item.num_pixels / more)
        if saved_s < cost_s + (more - count) * send_s:
            break
        count = more
    return count
