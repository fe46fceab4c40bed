"""A video is shared by as many encoders as pays."""

from msgspec.structs import replace

from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.encoders import choose_encoders, split_videos
from epd_serve.types import StageRate

RATE = StageRate(0.0, 1e-6)


def video(name="video", num_frames=64):
    """64 frames of as many pixels as a second of encoding has here."""
    return MediaRef(name, 250, 125, "video", num_frames=num_frames, fps=2.0)


def counts(table, *items, num_bytes=0):
    found = split_videos(table, table["p0"], items, [num_bytes] * len(items))
    assert [replace(item, num_segments=1) for item in found] == list(items), "nothing else is changed"
    return [item.num_segments for item in found]


def fleet(build, *instances, rate=RATE, **more):
    more = {"splits_videos": True, "load": build.load(rates={"E": rate})} | more
    return build(*instances, **more)


ENCODERS = "e0:E", "e1:E", "e2:E", "e3:E", "p0:P", "d0:D"


def test_each_free_encoder_has_a_segment(build):
    for count in range(1, 5):
        assert counts(fleet(build, *ENCODERS[:count], "p0:P"), video()) == [count]
    table = fleet(build, *ENCODERS)
    build.update(table, "e1:E:pixels=5000", splits_videos=True)
    assert counts(table, video()) == [3]
    with table.open_encode(table["e2"], video("another")):
        assert counts(table, video()) == [2]
    assert counts(table, build.item("picture"), video()) == [1, 1], "the picture needs one, too"
    assert counts(table, build.item("picture")) == [1]
    assert counts(fleet(build, "p0:P", "d0:D"), video()) == [1], "P encodes it"


def test_p_computes_the_first_segments_while_the_next_are_encoded(build):
    """Up to four segments for each idle encoder, unless P computes on the device of one."""
    for count in range(1, 5):
        table = fleet(build, *ENCODERS[:count], "p0:P")
        build.update(table, "p0:P", device="another", splits_videos=True)
        assert counts(table, video()) == [4 * count]
    assert counts(table, video(num_frames=18)) == [8], "whole rounds of nine groups"
    for num_bytes, expected in ((10**6, 16), (10**7, 8), (10**8, 3)):
        assert counts(table, video(), num_bytes=num_bytes) == [expected], "the file is sent for each segment"
    for base_s, expected in ((0.001, 16), (0.02, 12), (0.05, 8), (0.1, 3)):
        table = fleet(build, *ENCODERS, rate=StageRate(base_s, 1e-6))
        build.update(table, "p0:P", device="another", splits_videos=True)
        assert counts(table, video()) == [expected], base_s


def test_towers_that_mix_frames_get_all_of_them(build):
    assert counts(fleet(build, *ENCODERS, splits_videos=False), video()) == [1]


def test_one_more_encoder_must_save_what_it_costs(build):
    """The second encoder saves half of a second of work, the third a sixth, the fourth a twelfth."""
    for base_s, count in ((0.001, 4), (0.1, 3), (0.3, 2), (0.6, 1)):
        table = fleet(build, *ENCODERS, rate=StageRate(base_s, 1e-6))
        assert counts(table, video()) == [count], base_s
    table = fleet(build, *ENCODERS)
    assert counts(table, video(num_frames=4)) == [2], "two groups"
    assert counts(table, video(num_frames=2)) == [1]
    table = fleet(build, *ENCODERS, rate=StageRate(0.0, 1e-9))
    assert counts(table, video()) == [1], "a call is not for nothing"


def test_segments_that_are_there_are_not_encoded_again(build):
    """Whole, or in as many segments as it was; of the same video, and not for others."""
    for known in (1, 2, 3):
        table = fleet(build, *ENCODERS)
        for record, part in zip(table, replace(video(), num_segments=known).segments, strict=False):
            with table.open_encode(record, part):
                pass
        assert counts(table, video()) == [known]
        assert counts(table, video("another")) == [4]


def test_segments_go_to_encoders_of_their_own(build):
    table = fleet(build, *ENCODERS)
    [whole] = split_videos(table, table["p0"], [video()], [0])
    chosen = choose_encoders(table, table["p0"], whole.segments)
    assert sorted(one.name for one in chosen) == ["e0", "e1", "e2", "e3"]
