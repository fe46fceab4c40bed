"""The same small contract over every accelerator of this machine; skipped, visibly, where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from device.base import AttnMeta, Device
from device.ops.reference import ReferenceOps
from device.registry import get_device, list_devices

NAMES = [report.name for report in list_devices() if report.available and report.kind != "cpu"]
pytestmark = pytest.mark.skipif(not NAMES, reason="not run: no accelerator on this machine")


@pytest.fixture(params=NAMES or ["none"])
def device(request: pytest.FixtureRequest) -> Device:
    return get_device(request.param)


def test_streams_order_work_through_events(device: Device) -> None:
    device.activate()
    side = device.stream()
    data = torch.zeros(1 << 20, device=device.torch_device)
    device.synchronize()
    with side:
        data += 1
        event = side.record_event()
    device.current_stream().wait_event(event)
    total = data.sum()
    done = device.record_event()
    done.synchronize()
    assert done.query()
    assert total.item() == data.numel()


def test_memory_and_pinning(device: Device) -> None:
    total, free = device.memory()
    assert 0 < free <= total
    pinned = device.pin_memory(torch.ones(8))
    assert pinned.is_pinned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_oracle(device: Device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    kv_layer = torch.randn(2, 12, 16, 2, 64, generator=generator)
    query = torch.randn(9, 8, 64, generator=generator)
    key, value = torch.randn(2, 9, 2, 64, generator=generator).unbind(0)

    def run(target: torch.device, dtype: torch.dtype, oracle: bool) -> Tensor:
        meta = AttnMeta(
            block_size=16,
            slot_mapping=torch.tensor([3 * 16 + 4, 5 * 16, *range(7 * 16 + 1, 7 * 16 + 8)], device=target),
            num_decodes=2,
            decode_block_table=torch.tensor([[2, 3], [5, 0]], device=target),
            decode_context_lens=torch.tensor([21, 1], device=target),
            decode_context_lens_host=[21, 1],
            prefill_query_lens=[7],
            prefill_context_lens=[40],
            prefill_block_table=torch.tensor([[9, 8, 7]], device=target),
        )
        ops = ReferenceOps() if oracle else device.ops
        cache = kv_layer.to(target, dtype, copy=True)
        states = [tensor.to(target, dtype) for tensor in (query, key, value)]
        plan = ops.prepare(meta, dtype)
        ops.write_kv(states[1], states[2], cache, meta.slot_mapping)
        return ops.attend(*states, cache, plan, 0.125).float().cpu()

    expected = run(torch.device("cpu"), torch.float32, oracle=True)
    output = run(device.torch_device, dtype, oracle=False)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def test_graphs_replay_over_their_buffers(device: Device) -> None:
    device.activate()
    buffers = {size: torch.zeros(size, device=device.torch_device) for size in (1, 4)}
    runner = device.graph_runner()
    for size, buffer in buffers.items():
        runner.capture(size, lambda buffer=buffer: buffer * 2 + 1)
    for size, buffer in buffers.items():
        buffer.fill_(float(size))
        runner.update(size, [1] * size)
        assert runner.replay(size).tolist() == [2.0 * size + 1] * size
