"""An out-of-memory error on the only rank is torch's own error, and training goes on after it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import zeropp
from tests.support.branching_models import Routed, make_config
from zeropp.params.flat_buffer import FlatBuffer


@pytest.mark.parametrize("fails", [1, 3, 6])
def test_a_pass_that_ran_out_of_memory_can_be_repeated(fails: int) -> None:
    """Memory is short at one allocation of a unit's buffer: the first or third (forward) or the sixth (backward)."""
    torch.manual_seed(0)
    model, plain = Routed(), Routed()
    plain.load_state_dict(model.state_dict())
    config = make_config(prefetch=0, reuse=0)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    usual = torch.optim.SGD(plain.parameters(), lr=0.1)
    grown, grow = 0, FlatBuffer.alloc_storage

    def short(self: FlatBuffer) -> None:
        nonlocal grown
        grown += 1
        if grown == fails:
            raise torch.OutOfMemoryError("told to")
        grow(self)

    x = torch.randn(2, 8)
    with mock.patch.object(FlatBuffer, "alloc_storage", short), pytest.raises(torch.OutOfMemoryError, match="told to"):
        optimizer.backward(model(x).square().mean())
    assert grown >= fails
    for _ in range(2):
        for each, loss in ((optimizer, model(x).square().mean()), (usual, plain(x).square().mean())):
            each.zero_grad()
            loss.backward()
            each.step()
    state = zeropp.full_state(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
