"""Virtual ranks in one process (bench/convergence/ranks.py) give the bits of the engine with as many processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from bench.convergence.ranks import VirtualRanks
from bench.convergence.weights import make_weights
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks

STEPS = 3  # enough for error feedback to be used, and to be reset (reset_T is 2)


class Model(nn.Module):
    """Units of several sizes, with padding. Its loss is linear, so gradients equal the given tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Parameter(torch.randn(40, 37))
        self.blocks = nn.ModuleList(nn.Linear(48, 61) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        total = (self.table * gradients["table"]).sum() + self.scale * gradients["scale"]
        for index, block in enumerate(self.blocks):
            total = total + block(gradients[f"blocks.{index}.weight"], gradients[f"blocks.{index}.bias"])
        return total


class Given(nn.Linear):
    """A module whose output is the product of its parameters with given tensors, not a linear map."""

    def forward(self, weight: Tensor, bias: Tensor) -> Tensor:
        return (self.weight * weight).sum() + (self.bias * bias).sum()


def make_model() -> Model:
    model = Model()
    for block in model.blocks:
        block.__class__ = Given
    return model


def given(step: int, rank: int) -> dict[str, Tensor]:
    """Return the gradients of one rank in a step: heavy-tailed noise plus a constant direction."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(p.shape, generator=draw) ** 3 + 0.1 * p.detach().sign()
        for name, p in make_model().named_parameters()
    }


def by_the_engine(settings: dict[str, object]) -> list[dict[str, Tensor]]:
    """Return the main weights after each step of SGD with learning rate 1, which show every bit of the gradients."""
    model = make_model()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, make_config(**settings))
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(given(step, dist.get_rank())).backward()
        optimizer.step()
        found.append(zeropp.full_state(model))
    return found


def virtually(settings: dict[str, object], nodes: int, local: int) -> list[dict[str, Tensor]]:
    """Return the main weights after each step on virtual ranks."""
    model = make_model()
    ranks = VirtualRanks(model, zeropp.load_config(make_config(**settings)), nodes, local)
    parameters, found = dict(model.named_parameters()), []
    for step in range(STEPS):
        for rank in range(ranks.world):
            model(given(step, rank)).backward()
            ranks.take(rank)
        ranks.reduce()
        with torch.no_grad():
            for buffer in ranks.buffers:
                for slot, gradient in zip(buffer.layout.slots, buffer.layout.views(buffer.mean), strict=True):
                    parameters[slot.name].add_(gradient, alpha=-1.0)
        found.append({name: value.detach().clone() for name, value in parameters.items()})
    ranks.close()
    return found


GRADIENTS = {"zero_quantized_gradients": True}
LOCO = {**GRADIENTS, "zeropp_loco_param": {"reset_T": 2}}
SETTINGS: list[dict[str, object]] = [
    {"communication_data_type": "bf16"},
    GRADIENTS,
    {**GRADIENTS, "hadamard": True},
    LOCO,
    {**LOCO, "feedback": "both", "hadamard": True},
    {**LOCO, "gradient_bits": {"local": 4, "cross": 8}},
]


@pytest.mark.every(4)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradients_have_the_engines_bits(settings: dict[str, object]) -> None:
    virtual = virtually(settings, 2, 2)
    for found in run_ranks(4, by_the_engine, settings, local_world_size=2):
        for step, (engine, own) in enumerate(zip(found, virtual, strict=True)):
            assert engine.keys() == own.keys()
            wrong = [name for name in own if not torch.equal(engine[name], own[name])]
            assert wrong == [], f"step {step}"


def test_one_hop_and_the_exact_mean() -> None:
    """With one node of three ranks, ``exact`` is the mean of the gradients, and float32 arrives unquantized."""
    model = make_model()
    ranks = VirtualRanks(model, zeropp.load_config(make_config()), 1, 3)
    for rank in range(3):
        model(given(0, rank)).backward()
        ranks.take(rank)
    ranks.reduce()
    for buffer in ranks.buffers:
        for slot, view in zip(buffer.layout.slots, buffer.layout.views(buffer.exact), strict=True):
            mean = torch.stack([given(0, rank)[slot.name] for rank in range(3)]).mean(0)
            torch.testing.assert_close(view, mean)
        torch.testing.assert_close(buffer.mean, buffer.exact)
    assert ranks.gradient_bits() == {"local": 32.0}
    ranks.close()


def test_a_rank_that_fails_stops_the_others() -> None:
    model = make_model()
    ranks = VirtualRanks(model, zeropp.load_config(make_config(**GRADIENTS)), 2, 2)
    for rank in range(4):
        model(given(0, rank)).backward()
        ranks.take(rank)
    ranks._messages[2][0] = torch.empty(3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="size"):
        ranks.reduce()
    ranks.close()


def test_placements_without_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="stage 3"):
        VirtualRanks(make_model(), zeropp.load_config(make_config(stage=1)), 2, 2)


# Tests of weights.


def weights_seen() -> dict[str, Tensor]:
    """Return the weights that a rank computes with, read in a forward after a step."""
    model = make_model()
    config = make_config(zero_quantized_weights=True, bf16={"enabled": True})
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, config)
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[f"{names[module]}.{name}"] = parameter.detach().clone()

    names = {block: f"blocks.{index}" for index, block in enumerate(model.blocks)}
    for block in model.blocks:
        block.register_forward_hook(look)
    model(given(0, dist.get_rank())).backward()
    optimizer.step()
    return seen


def test_int8_weights_have_the_engines_bits() -> None:
    model = make_model()
    ranks = VirtualRanks(model, zeropp.load_config(make_config(zero_quantized_weights=True)), 2, 2)
    expected = {}
    for buffer in ranks.buffers:
        numel, values = buffer.layout.numel, dict(model.named_parameters())
        main, seen = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)
        for slot, view in zip(buffer.layout.slots, buffer.layout.views(main), strict=True):
            view.copy_(values[slot.name].detach())
        make_weights("config", numel, 4, ranks.weight_codec, main.device, 1).refresh(main, seen)
        expected.update(zip([slot.name for slot in buffer.layout.slots], buffer.layout.views(seen), strict=True))
    ranks.close()
    for found in run_ranks(4, weights_seen, local_world_size=2):
        assert len(found) == 4
        assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("kind", ["delta4", "lossless"])
def test_differences_follow_the_weights(kind: str) -> None:
    """After each step the copy differs by at most one 4-bit quantization error, or not at all if lossless."""
    draw = torch.Generator().manual_seed(5)
    main, seen = torch.randn(4096, generator=draw), torch.empty(4096, dtype=torch.bfloat16)
    weights = make_weights(kind, 4096, 4, None, main.device, 1)
    weights.refresh(main, seen)
    for _ in range(60):  # many steps, so that errors would exceed the bound if they accumulated
        main += 1e-3 * torch.randn(4096, generator=draw)
        weights.refresh(main, seen)
        if kind == "lossless":
            assert torch.equal(seen, main.bfloat16())
    rounding = main.abs() * 2**-8
    assert ((seen.float() - main).abs() <= rounding + 2e-3).all()
    assert weights.bits < 16
