"""The segments in which a video is encoded: one for each encoder that has nothing to do, as far as it pays."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.encoders import encoders
from epd_serve.routing.table import InstanceRecord, InstanceTable

#: Seconds of a call and of finding a segment in its file, beside a batch of the encoder.
_CALL_S = 0.005


def in_segments(table: InstanceTable, prefill: InstanceRecord, items: Sequence[MediaRef]) -> list[MediaRef]:
    """The items of a request, videos with the number of segments that each is to be encoded in."""
    if all(item.modality != "video" for item in items):
        return list(items)
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
