"""The cheapest pair is the one that looking at every pair finds."""

from hypothesis import given, settings
from hypothesis import strategies as st
from instance_info import instance_info

from epd_serve.protocol.instance_state import InstanceInfo, Load, Report
from epd_serve.routing.routes import Demand, cheapest_of_many, in_turn, near_best, pairs_of, route_parts
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage, StageRate

ROLES = ("P", "D", "PD", "EPD", "EP", "ED", "E")


def _info(name: str, role: str, host: str, device: str) -> InstanceInfo:
    return instance_info(
        name,
        role,
        max_model_len=4096,
        device=device,
        host_id=host,
        block_size=16,
        kv_token_bytes=100_000,
        tokens_per_pixel=0.001,
    )


instances = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(ROLES),
            "host": st.sampled_from(["", "h0", "h1"]),
            "device": st.sampled_from(["cuda:0", "cuda:1", "cpu"]),
            "running": st.integers(0, 3),
            "tokens": st.sampled_from([0, 0, 500, 5000]),
            "pixels": st.sampled_from([0, 0, 10**6]),
            "free": st.sampled_from([0, 10, 10_000]),
            "chosen": st.tuples(st.integers(0, 2), st.integers(0, 2)),
            "rate": st.sampled_from([1e-4, 2e-3]),
        }
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    instances=instances,
    num_tokens=st.sampled_from([1, 100, 5000]),
    num_pixels=st.sampled_from([0, 10**6]),
    cuts=st.sets(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=40),
    are_cut=st.booleans(),
)
def test_it_is_the_choice_among_all_pairs(
    instances: list[dict[str, object]],
    num_tokens: int,
    num_pixels: int,
    cuts: set[tuple[int, int]],
    are_cut: bool,
) -> None:
    instances = [*instances, {**instances[0], "role": "P"}, {**instances[-1], "role": "D"}]
    table = InstanceTable([(str(i), "") for i in range(len(instances))])
    for i, one in enumerate(instances):
        table.update(str(i), _info(str(i), str(one["role"]), str(one["host"]), str(one["device"])), contains=0)
    for i, one in enumerate(instances):
        load = Load(
            num_running=one["running"],  # type: ignore[arg-type]
            num_waiting_tokens=one["tokens"],  # type: ignore[arg-type]
            num_waiting_pixels=one["pixels"],  # type: ignore[arg-type]
            free_blocks=one["free"],  # type: ignore[arg-type]
            total_blocks=10_000,
            rates={stage.value: StageRate(0.01, one["rate"]) for stage in Stage},  # type: ignore[arg-type]
        )
        table.report(str(i), Report(load=load))
        chosen = one["chosen"]
        assert isinstance(chosen, tuple)
        table[str(i)].num_chosen[Stage.PREFILL] = chosen[0]
        table[str(i)].num_chosen[Stage.DECODE] = chosen[1]
        table[str(i)].cut_off.update(str(peer) for one, peer in cuts if are_cut and one == i != peer)
    demand = Demand(num_tokens=num_tokens, num_pixels=num_pixels, max_tokens=64)
    parts = route_parts(table, "m", (), demand)
    pairs = pairs_of(parts, demand)
    *_, prefill, decode = min(near_best(pairs), key=in_turn)
    if not any(one.cut_off for one in parts.prefills):
        assert cheapest_of_many(parts, demand) == parts.route(prefill, decode)
    if parts.route(prefill, decode).is_cut:
        assert all(parts.route(prefill, decode).is_cut for *_, prefill, decode in pairs)
    else:
        assert not any(parts.route(prefill, decode).is_cut for *_, prefill, decode in pairs)
