"""A training loop for DeepSpeed's engine has the losses under zeropp that it has under DeepSpeed."""

from __future__ import annotations

import contextlib
import io
import json
import os

import deepspeed_style
import pytest

from tests.support.deepspeed_losses import FILE, STAGES, made_with
from tests.support.rank_pool import run_ranks, some

# Bound on the difference of losses. Sums in fp32 have another order over thirty steps; 4e-7 was measured.
CLOSE = 1e-5


def style_losses(stage: int, steps: int) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        return deepspeed_style.train(deepspeed_style.parse_arguments([f"--stage={stage}", f"--steps={steps}"]))


@pytest.mark.parametrize("steps", some([6, 30], 2))
@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_deepspeed_s(stage: int, steps: int) -> None:
    expected = json.loads(FILE.read_text())["losses"][str(stage)]
    assert len(expected) == 30 and expected[-1] < expected[0] - 2, "the reference has learnt something"
    for losses in run_ranks(2, style_losses, stage, steps):
        assert losses == pytest.approx(expected[:steps], rel=0, abs=CLOSE)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_the_stored_losses_equal_those_of_deepspeed() -> None:
    python = os.environ.get("ZEROPP_PEER_PYTHON")
    if python is None:
        pytest.skip("ZEROPP_PEER_PYTHON, the interpreter of an environment with DeepSpeed, is not set")
    kept, made = json.loads(FILE.read_text()), made_with(python)
    assert made["deepspeed"] == kept["deepspeed"]
    for stage in STAGES:
        assert made["losses"][str(stage)] == pytest.approx(kept["losses"][str(stage)], rel=0, abs=CLOSE)
