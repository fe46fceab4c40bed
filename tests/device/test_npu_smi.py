"""npu-smi's table as users published it, cut to the first chips."""

from __future__ import annotations

from pathlib import Path

import pytest

from device import npu_smi
from device.npu_smi import parse

# github.com/vllm-project/vllm-ascend/issues/1130
A2 = """
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 97.5        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3379 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 93.9        40                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3385 / 65536         |
+===========================+===============+====================================================+
"""
# github.com/vllm-project/vllm-ascend/issues/2035
A3 = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3.7               Version: 24.1.rc3.7                                           |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.8       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3397 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3186 / 65536         |
+===========================+===============+====================================================+
"""
# github.com/ollama/ollama/issues/5315
OF_310P = """
+--------------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                                 Version: 24.1.rc2                                     |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 1       310P3                 | OK              | NA           59                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1397 / 44280                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 1       310P3                 | OK              | NA           58                0     / 0             |
| 1       1                     | 0000:01:00.0    | 0            1520 / 43693                            |
+===============================+=================+======================================================+
"""


@pytest.mark.parametrize(
    ("text", "chips"),
    [
        (A2, [("910B3", "OK")] * 2),
        (A3, [("Ascend910", "OK")] * 2),
        (OF_310P, [("310P3", "OK")] * 2),
        (A2.replace("0           0    / 0          3379 / 65536", "NA          NA"), [("910B3", "OK")] * 2),
        ("dcmi model initialized failed, because the device is used. ret is -8020\n", []),
    ],
)
def test_chips_of_a_table(text: str, chips: list[tuple[str, str]]) -> None:
    assert parse(text) == chips


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An npu-smi that prints the table of A2, whose second chip is not well."""
    table = A2.replace("910B3               | OK            | 93.9", "910B3               | Alarm         | 93.9")
    program = tmp_path / "npu-smi"
    program.write_text(f"#!/bin/sh\ncat <<'TABLE'\n{table}TABLE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)


def test_health_of_a_visible_device(tool: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert npu_smi.check_health(0) == "npu-smi says OK of chip 0, 910B3"
    with pytest.raises(AssertionError, match="Alarm of chip 1"):
        npu_smi.check_health(1)
    assert "not number 2" in npu_smi.check_health(2)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    with pytest.raises(AssertionError, match="Alarm of chip 1"):
        npu_smi.check_health(0)
