"""``torch.autograd.grad`` for parameters returns this rank's own gradients, as plain torch computes them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks

SETTINGS: list[dict[str, object]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {},
    {"persist": 1000},
    {"persist": 20, "reuse": 0, "live": 0},
    {"unit_min_blocks": 128, "overlap_comm": False},
]


class Heads(nn.Module):
    """Three blocks, one frozen weight, a head tied to the first layer, and a layer that forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.first.weight
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x), self.head(x)


def made(settings: dict[str, object]) -> tuple[Heads, Heads, zeropp.ZeroOptimizer]:
    torch.manual_seed(0)
    model = Heads().double()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, plain, zeropp.ZeroOptimizer(optimizer, model, make_config(**settings))


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, dtype=torch.float64, generator=generator).requires_grad_()


def balanced(model: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return VQGAN's loss, and the weight of its second term.

    The weight is a ratio of gradient norms with respect to the weights of the two output layers.
    """
    first, second = (output.square().mean() for output in model(x))
    (a,) = torch.autograd.grad(first, model.last.weight, retain_graph=True)
    (b,) = torch.autograd.grad(second, model.head.weight, retain_graph=True)
    weight = (a.norm() / (b.norm() + 1e-4)).clamp(0, 1e4).detach()
    return first + weight * second, weight


def by_task(model: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of two losses, weighted by gradient norms as in GradNorm, and the weights with the norms.

    Gradients are those with respect to the input and all trainable weights.
    """
    losses = [output.square().mean() for output in model(x)]
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    norms = []
    for loss in losses:
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        assert [g is None for g in found].count(True) > 2
        filled = torch.autograd.grad(loss, wanted, retain_graph=True, materialize_grads=True)
        assert all(
            g.shape == p.shape and (f is None or g.equal(f)) for f, g, p in zip(found, filled, wanted, strict=True)
        )
        norms.append(torch.stack([g.norm() for g in filled]))
    weights = torch.stack(norms).mean(1).detach()
    return (weights * torch.stack(losses)).sum(), torch.cat([weights, *norms]).detach()


def alone(model: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss, and gradients from two other forwards, whose graphs are freed before the forward of the loss."""
    (found,) = torch.autograd.grad(model(x)[0].abs().mean(), [model.blocks[0][0].weight])
    (again,) = torch.autograd.grad(model(x)[1].abs().mean(), inputs=model.blocks[2][0].bias)
    return sum(output.square().mean() for output in model(x)), torch.cat([found.flatten(), again])


def jacobian(model: Heads, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss, and the gradients of four sums of outputs, which one batched call computes."""
    first, second = model(x)
    wanted = [model.last.weight, model.blocks[1][0].bias, model.first.weight, x]
    rows = torch.autograd.grad(first.sum(0), wanted, torch.eye(4).double(), retain_graph=True, is_grads_batched=True)
    return first.square().mean() + second.square().mean(), torch.cat([row.flatten() for row in rows])


LOSSES = {"balanced": balanced, "by task": by_task, "alone": alone, "jacobian": jacobian}


def trained(kind: str, settings: dict[str, object], world: int) -> float:
    """Train three steps of two micro-batches, and plain torch beside them.

    Args:
        kind: key of LOSSES.
        settings: keys for ``make_config``.
        world: number of ranks.

    Returns:
        Largest difference from plain torch: of weights, and of gradients that the loss function asks for.
    """
    model, plain, optimizer = made(settings)
    reference, loss_of = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), LOSSES[kind]
    rank, off = torch.distributed.get_rank(), 0.0
    for step in range(3):
        for micro in range(2):
            want = []
            for each in range(world):
                loss, found = loss_of(plain, inputs(2 * step + micro, each))
                (loss / world).backward()
                want.append(found)
            loss, found = loss_of(model, inputs(2 * step + micro, rank))
            loss.backward()
            off = max(off, float((found - want[rank]).abs().max()))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    return max(off, worst(zeropp.full_state(model), plain.state_dict()))


@pytest.mark.every(14)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", LOSSES)
def test_training_goes_on_as_in_plain_torch(kind: str, settings: dict[str, object]) -> None:
    assert max(run_ranks(2, trained, kind, settings, 2)) < 1e-12


def refused(settings: dict[str, object]) -> list[str]:
    model, _, optimizer = made(settings)
    x, said = inputs(0, 0), []

    def tried(call: Callable[[Tensor], object]) -> None:
        loss = model(x)[0].square().mean()
        with pytest.raises(RuntimeError) as error:
            call(loss)
        said.append(str(error.value))

    tried(lambda loss: torch.autograd.grad(loss, model.last.weight, create_graph=True))
    tried(lambda loss: torch.autograd.grad(loss, model.blocks[1][0].weight))
    tried(lambda loss: torch.autograd.grad(loss, model.unused.weight))
    # A refused call must not stop or change the next step.
    model(x)[0].square().mean().backward()
    optimizer.step()
    return said


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [3, 0])
def test_refusals(stage: int) -> None:
    for graph, frozen, unused in run_ranks(2, refused, {"stage": stage}):
        assert "create_graph=True" in graph
        assert "'blocks.1.0.weight', which does not require grad" in frozen
        assert "not have been used in the graph" in unused


def with_inputs(settings: dict[str, object]) -> float:
    """Train two steps. Before each backward, calls of backward with parameters in ``inputs=`` are refused.

    Returns:
        Largest difference of weights from plain torch.
    """
    model, plain, optimizer = made(settings)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    rank = torch.distributed.get_rank()
    for step in range(2):
        x = inputs(step, rank)
        loss = sum(output.square().mean() for output in model(x))
        calls: list[Callable[[], object]] = [
            lambda loss=loss: loss.backward(inputs=[model.last.weight]),
            lambda loss=loss: loss.backward(inputs=model.last.weight, retain_graph=True),
            lambda loss=loss, x=x: loss.backward(None, True, False, [x, model.last.weight]),
            lambda loss=loss: torch.autograd.backward([loss], inputs=(model.last.weight, model.first.weight)),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=r"backward\(inputs=...\) was given parameter 'last\.weight'"):
                call()
        loss.backward(inputs=[x], retain_graph=True)
        loss.backward()
        for each in range(2):
            (sum(output.square().mean() for output in plain(inputs(step, each))) / 2).backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", SETTINGS[4:1:-1], ids=str)
def test_a_backward_to_parameters_alone_is_refused(settings: dict[str, object]) -> None:
    assert max(run_ranks(2, with_inputs, settings)) < 1e-12


def asked_on_one_rank(settings: dict[str, object]) -> float:
    """Train four steps. In the last two, rank 0 alone computes the gradient of its input before backward, as for a log.

    Returns:
        Largest difference of weights from plain torch.
    """
    model, plain, optimizer = made(settings)
    own = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for each, ranks in ((plain, range(2)), (model, [dist.get_rank()])):
            for rank in ranks:
                x = inputs(step, rank)
                loss = each(x)[0].square().mean() / len(ranks)
                if rank == 0 and step > 1:
                    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
                    assert gradient.shape == x.shape
                loss.backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{"persist": 1000}, {"stage": 0}, {"stage": 1}, {"stage": 2}], ids=str)
def test_one_rank_may_ask_alone_where_nothing_is_gathered(settings: dict[str, object]) -> None:
    assert max(run_ranks(2, asked_on_one_rank, {**settings, "hang_timeout": 10})) < 1e-12


def called_alone(settings: dict[str, object]) -> str:
    """Call a layer outside the model's forward. Its unit belongs to the block around it, so the layer gathers nothing.

    The block that the error names can be called, and so can the layer inside GatheredParameters.

    Returns:
        The error of the call of the layer.
    """
    model, plain, _ = made(settings)
    x = inputs(0, 0)
    with pytest.raises(RuntimeError) as error:
        model.blocks[2][0](x)
    for name in ("blocks.2", "last"):
        assert torch.allclose(model.get_submodule(name)(x), plain.get_submodule(name)(x))
    with zeropp.zero.GatheredParameters(list(model.blocks[2].parameters())):
        assert torch.allclose(model.blocks[2][0](x), plain.blocks[2][0](x))
    return str(error.value)


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", [{"persist": 20}, {"stage": 2}, {"stage": 3}], ids=str)
def test_a_module_inside_a_unit_that_is_called_alone(settings: dict[str, object]) -> None:
    for said in run_ranks(2, called_alone, settings):
        assert "call module 'blocks.2', which fetches it, or one around it" in said
