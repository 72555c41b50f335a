"""Optimizer states that are reset to zeros during training: later steps do not use the old states in swap files."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zeropp
from tests.support.offload_pairs import Run, host_apart, run, same
from tests.support.rank_pool import run_ranks, spread


class BeginAgain:
    """Callback that resets all moments and step counts after the third step.

    Args:
        how: "cleared" clears the wrapped optimizer's states; "loaded" loads a state dict of zeros.
    """

    def __init__(self, how: str) -> None:
        self.how, self.steps = how, 0

    def __call__(self, model: nn.Module, optimizer: zeropp.ZeroOptimizer, when: str) -> None:
        self.steps += when == "step"
        if when != "step" or self.steps != 3:
            return
        if self.how == "cleared":
            # Reading optimizer.state waits for the step on the host, which must end before its states are cleared.
            assert any(state["exp_avg"].any() for state in optimizer.state.values())
            optimizer.inner.state.clear()
        else:
            zeros = copy.deepcopy(optimizer.state_dict())
            for state in zeros["state"].values():
                for value in state.values():
                    value.zero_()
            optimizer.load_state_dict(zeros)


def trained(how: str, settings: dict[str, Any], apart: bool) -> list[str]:
    plain = run(Run(paused=BeginAgain(how), steps=5))
    with host_apart(apart):
        return same(plain, run(replace(Run(steps=5, settings=settings), paused=BeginAgain(how))))


@pytest.mark.parametrize(("how", "apart"), spread(["cleared", "loaded"], [True, False], 2))
def test_nothing_of_old_states_is_left(how: str, apart: bool, tmp_path: Path) -> None:
    settings = {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        "aio": {"block_size": 1024},
    }
    assert run_ranks(2, trained, how, settings, apart) == [[], []]
