"""GPU memory opened by a second process; the handle's bytes are checked everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device.cuda_ipc import export_tensor, pack, unpack

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no GPU on this machine")
NATURAL = st.integers(0, 2**63 - 1)
FIELDS = st.fixed_dictionaries(
    {
        "gpu": st.text(),
        "dtype": st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "uint8"]),
        "shape": st.lists(NATURAL, min_size=2, max_size=2),
        "stride": st.lists(NATURAL, min_size=2, max_size=2),
        "memory": st.binary(max_size=80),
        "counter": st.binary(max_size=80),
        "event": st.binary(max_size=80),
        "waits": st.booleans(),
        **dict.fromkeys(("size", "offset", "counter_offset", "tensor_offset"), NATURAL),
    }
)
CHILD = """
import sys
from device.cuda_ipc import import_tensor
tensor = import_tensor(bytes.fromhex(sys.stdin.readline()))
print(tuple(tensor.shape), tensor.stride(), float(tensor.float().sum()), flush=True)
tensor += 1
import torch
torch.cuda.synchronize()
"""


@given(fields=FIELDS)
def test_handles_survive_the_wire(fields: dict[str, Any]) -> None:
    assert unpack(pack(fields)) == fields


@given(fields=FIELDS, broken=st.data())
def test_broken_handles_are_refused(fields: dict[str, Any], broken: st.DataObject) -> None:
    flat = json.loads(pack(fields))
    name = broken.draw(st.sampled_from(sorted(flat)))
    if broken.draw(st.booleans()):
        del flat[name]
    else:
        flat[name] = broken.draw(
            st.sampled_from([None, -1, "zz", [None], [-1], {}, 0.5]).filter(lambda x: x != fields[name])
        )
        if name == "gpu" and isinstance(flat[name], str):
            return
    with pytest.raises(ValueError, match="not a handle"):
        unpack(json.dumps(flat).encode())


@pytest.mark.parametrize("handle", [b"", b"[]", b"\xff", b"null", b"{}"])
def test_other_bytes_are_refused(handle: bytes) -> None:
    with pytest.raises(ValueError, match="not a handle"):
        unpack(handle)


def test_host_memory_is_not_exported() -> None:
    with pytest.raises(ValueError, match="only GPU memory"):
        export_tensor(torch.zeros(1))


@ON_GPU
def test_another_process_reads_and_writes_the_same_memory() -> None:
    base = torch.arange(4096, device="cuda", dtype=torch.float32).view(64, 64)
    tensor = base[8:16, ::2]
    expected = f"{tuple(tensor.shape)} {tensor.stride()} {float(tensor.sum())}"
    before = base.clone()
    torch.cuda.synchronize()
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=export_tensor(tensor).hex() + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == expected
    before[8:16, ::2] += 1
    assert torch.equal(base, before)
