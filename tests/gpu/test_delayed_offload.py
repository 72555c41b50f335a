"""With offloaded states and weights, delays of comm streams, computation, host steps and file access change no bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.delays import Delays, train
from tests.support.offload_pairs import delayed, host_apart

BF16 = {"bf16": {"enabled": True}}
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
SMALL = {"device": "cpu", "pin_memory": True, "buffer_count": 2, "buffer_size": 4096}
SETTINGS: dict[str, dict[str, Any]] = {
    "optimizer": CPU,
    "optimizer, bf16, nothing kept": {**CPU, **BF16, "reuse": 0, "prefetch": 0},
    "both, bf16": {**CPU, **BF16, "offload_param": SMALL, "reuse": 0, "sub_group_size": 4096},
    # The refresh sends the new weights, and the memory that they are sent from is reused soon.
    "stage 1, bf16": {**CPU, **BF16, "stage": 1, "overlap_comm": True},
    "qwZ, bf16": {**CPU, **BF16, "zero_quantized_weights": True, "reuse": 0},
    "a part": {"offload_optimizer": {"device": "cpu", "ratio": 0.3, "pin_memory": True}, "reuse": 0},
    "files": {
        "offload_optimizer": {"device": "nvme", "pin_memory": True, "pipeline_read": True, "pipeline_write": True},
        "offload_param": {**SMALL, "device": "nvme", "max_in_cpu": 0},
        "aio": {"block_size": 4096}, "sub_group_size": 4096, "reuse": 0,
    },
}  # fmt: skip
KINDS = ("gather", "reduce", "refresh")


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a case, with ``nvme_path`` set to ``folder`` in each block for "nvme"."""
    return {
        key: {**value, "nvme_path": str(folder)} if isinstance(value, dict) and value.get("device") == "nvme" else value
        for key, value in SETTINGS[name].items()
    }


LATE = ("all", "streams", "computing", "host")
# On CPU the default suite draws its rows from "all" of every setting and all delays of "optimizer": see the mark
# ``every``. The campaign runs the rest.
CASES = [
    pytest.param("cpu", name, late, marks=() if late == "all" or name == "optimizer" else pytest.mark.campaign)
    for name in SETTINGS for late in LATE
] + [pytest.param("cuda", name, late, marks=pytest.mark.gpu) for late in LATE for name in SETTINGS]  # fmt: skip


@pytest.mark.every(4)
@pytest.mark.parametrize(("device", "name", "late"), CASES)
def test_no_bit_changes(device: str, name: str, late: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path / "swap")
    with host_apart(device == "cpu"):
        expected = train(device, settings)
        comm_streams = KINDS if late in ("streams", "all") else ()
        delays = Delays(device, comm_streams=comm_streams, computing=late in ("computing", "all"))
        with delayed(0) if late in ("host", "all") else contextlib.nullcontext({"step": 1}) as seen:
            assert expected.differs(train(device, settings, delays)) == []
    assert seen["step"] > 0 and (late == "host" or delays.slept), "nothing was late"
