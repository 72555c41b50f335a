"""Changes of ``requires_grad`` that are refused: ranks that disagree raise, and complex parameters are named."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.branching_models import WIDTH
from tests.support.freezing_model import Tower, attempt, train, wrap
from tests.support.rank_pool import run_ranks


def disagreement() -> tuple[str, str, float]:
    """Let each rank freeze a different block, run the model twice, and then make the ranks agree.

    Returns:
        Errors of both forwards, and a sum of outputs after training on.
    """
    model = Tower().double()
    optimizer = wrap(model)
    train(model, optimizer, 2)
    rank = dist.get_rank()
    model.blocks[rank].requires_grad_(False)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    first = attempt(lambda: model(x))
    again = attempt(lambda: model(x))
    model.blocks[1].requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    train(model, optimizer, 2)
    return first, again, float(model(x).detach().sum())


def test_ranks_that_disagree_are_told_and_may_come_to_terms() -> None:
    found = run_ranks(2, disagreement)
    for first, again, _ in found:
        assert first == again
        assert "ranks 0 and 1 disagree whether 'blocks.0.lin.weight' is trained" in first
        assert "False and True" in first and "same value on every rank" in first
    assert found[0][2] == found[1][2]


def alone() -> str:
    model = Tower().double()
    optimizer = wrap(model, hang_timeout=2)
    train(model, optimizer, 3)
    if dist.get_rank() == 0:
        model.blocks[0].requires_grad_(False)
    return attempt(lambda: train(model, optimizer, 1))


def test_one_rank_alone_is_an_error_on_all() -> None:
    for said in run_ranks(2, alone):
        assert "The ranks are no longer in step" in said
        assert "rank 0 was changing which parameters are trained" in said


def there_and_back() -> str:
    """Let rank 0 freeze and unfreeze a block, and unfreeze a block that is trainable already; return the error if any.

    Nothing has changed by the next forward, so the ranks need not agree on anything.
    """
    model = Tower().double()
    optimizer = wrap(model, hang_timeout=3)
    train(model, optimizer, 2)
    if dist.get_rank() == 0:
        model.blocks[0].requires_grad_(False)
        model.blocks[0].requires_grad_(True)
        model.blocks[1].requires_grad_(True)
    return attempt(lambda: train(model, optimizer, 2))


def test_a_change_that_is_taken_back_is_none() -> None:
    assert run_ranks(2, there_and_back) == ["nothing"] * 2


class Phase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * (self.turn * (1 + 1j)).real


def complex_unfrozen() -> tuple[str, str]:
    model = Phase()
    optimizer = wrap(model)
    model.turn.requires_grad_(True)
    first = attempt(lambda: model(torch.ones(1, WIDTH)))
    model.turn.requires_grad_(False)
    second = attempt(lambda: (model(torch.ones(1, WIDTH)).sum().backward(), optimizer.step()))
    return first, second


def test_complex_parameters_are_refused_by_name() -> None:
    for first, second in run_ranks(2, complex_unfrozen):
        assert "parameter 'turn' is complex" in first and "view_as_real" in first
        assert second == "nothing"
