"""The waits in zeropp/deepspeed order all accesses to memory, and none of them can be left out; see tests/streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.golden.runs import CASES
from tests.streams.runs import BOTH, Run, Training, check_reported, offloaded, races
from tests.streams.seams import Seam, seams
from zeropp.deepspeed.parameter_values import (
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)


def parts_are_read(t: Training) -> None:
    """Read this rank's parts of parameters while a step may be in flight."""
    t.step()
    for value in tree_leaves([parameter.ds_tensor.data for parameter in t.model.parameters()]):
        if isinstance(value, Tensor):
            value.clone()


def weights_are_set(t: Training) -> None:
    """Set main weights, as a whole and in part, right after steps."""
    weight = t.model[0].norm.weight
    t.step()
    safe_set_full_fp32_param(weight, torch.ones(t.run.width))
    t.step()
    own = safe_get_local_fp32_param(weight)
    assert own is not None, "the parameter is on another rank, which is not simulated"
    safe_set_local_fp32_param(weight, own.clone())


RUNS: dict[str, Run] = {
    "parts are read, hpZ": Run(CASES["hpZ, bf16"], [parts_are_read]),
    "parts are read, offloaded": offloaded(BOTH, ways=[parts_are_read]),
    "weights are set": Run(CASES["hpZ, bf16"], [weights_are_set]),
}
# For each wait, the run in which leaving the wait out is noticed.
SHOWN = {
    "deepspeed/extension.py LocalPart._place 1": "parts are read, offloaded",
    "deepspeed/parameter_values.py safe_set_full_fp32_param 1": "weights are set",
    "deepspeed/parameter_values.py safe_set_local_fp32_param 1": "weights are set",
}
# Waits that no run reaches, or that do not protect memory, each with the reason.
ELSEWHERE = {
    "deepspeed/checkpointing.py _synchronize 1": "measures time",
    "deepspeed/checkpointing.py _SavedOnHost.__call__ 1": "for a backward that is on another stream than its forward",
    "deepspeed/training_optimizer.py LossScaler.cur_iter 1": "PendingSum.read_sum waits for a step's result",
    "deepspeed/training_optimizer.py TrainingOptimizer.fp32_partitioned_groups_flat 1": "as ZeroOptimizer.state",
}
BY_NAME: dict[str, Seam] = {seam.name: seam for seam in seams("deepspeed/**/*.py")}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", RUNS)
def test_every_access_is_ordered(name: str, tmp_path: Path) -> None:
    assert races(RUNS[name], tmp_path) == []


def test_every_wait_is_accounted_for() -> None:
    known = {*SHOWN, *ELSEWHERE}
    own = {name for name, seam in BY_NAME.items() if seam.module.startswith("zeropp/deepspeed/")}
    assert not own - known, f"say which run shows the need of {own - known}, in SHOWN, or why none does"
    assert not known - BY_NAME.keys(), "the tables name waits that do not exist"


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SHOWN)
def test_a_missing_wait_is_reported(name: str, tmp_path: Path) -> None:
    check_reported([BY_NAME[name]], RUNS[SHOWN[name]], tmp_path)
