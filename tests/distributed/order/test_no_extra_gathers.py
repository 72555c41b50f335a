"""Training, evaluation and generation in turn issue no more collectives than the three passes do by themselves.

This holds from the third round on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Block, logged, make_config
from tests.support.rank_pool import run_ranks

ROUNDS = 20
# Number of ranks, ranks per node, and keys for make_config, by name of the placement.
PLACED: dict[str, tuple[int, int, dict[str, object]]] = {
    "stage 3": (2, 2, {}),
    "stage 3 bare": (2, 2, {"prefetch": 0, "reuse": 0, "live": 0}),
    "stage 3, small persistent": (2, 2, {"persist": WIDTH}),
    "stage 1": (2, 2, {"stage": 1}),
    "stage 2": (2, 2, {"stage": 2}),
    "hpz": (4, 2, {"zero_hpz_partition_size": 2}),
    "mics": (4, 2, {"mics_shard_size": 2}),
}


class Decoder(nn.Module):
    """Blocks that are applied to a growing sequence, and a head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.critic = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.critic(x) if self.training else x

    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = torch.cat([x, self(x)[-1:]])
        return x


def campaign(placement: str) -> object:
    """Return a placement that only the campaign runs."""
    return pytest.param(placement, marks=pytest.mark.campaign)


def train(model: Decoder, optimizer: zeropp.ZeroOptimizer) -> None:
    model.train()
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(model(torch.ones(2 + dist.get_rank(), WIDTH)).square().mean())
    optimizer.step()


def evaluate(model: Decoder, optimizer: zeropp.ZeroOptimizer) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, WIDTH))


def generate(model: Decoder, optimizer: zeropp.ZeroOptimizer) -> None:
    model.eval()
    with torch.inference_mode():
        model.generate(torch.ones(1, WIDTH), 4)


PASSES: dict[str, Callable[[Decoder, zeropp.ZeroOptimizer], None]] = {
    "train": train, "evaluate": evaluate, "generate": generate,
}  # fmt: skip
# Forwards of a round that skip the critic. Each ends with an exchange, because another rank may need the critic.
PASSED_OVER = 5
Calls = Counter[tuple[str, str]]


def rounds(settings: dict[str, object], names: list[str]) -> tuple[list[Calls], list[int], list[str]]:
    """Run twenty rounds of some passes.

    Args:
        settings: keys for ``make_config``.
        names: the passes of a round, keys of ``PASSES``.

    Returns:
        For each round, the collectives by (kind, unit); for each round, the number of exchanges; all logged messages.
    """
    with logged() as messages:
        model = Decoder()
        config = make_config(**settings, log_trace_cache_warnings=True, gradient_accumulation_steps=2)
        optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
        ledger = optimizer.engine.comm.ledger
        calls, agreed = [], []
        for _ in range(ROUNDS):
            ledger.reset()
            for name in names:
                PASSES[name](model, optimizer)
            optimizer.engine.wait_for_refresh()
            calls.append(Counter({(row.kind, row.unit): row.calls for row in ledger.rows if row.kind != "control"}))
            agreed.append(sum(row.calls for row in ledger.rows if row.unit == "<agreement>"))
        return calls, agreed, messages


def all_rounds(settings: dict[str, object]) -> dict[str, tuple[list[Calls], list[int], list[str]]]:
    """Return the results of :func:`rounds` for each pass without the others, and for all passes in turn."""
    return {" ".join(names): rounds(settings, names) for names in (*([name] for name in PASSES), list(PASSES))}


@pytest.mark.campaign
@pytest.mark.parametrize("placement", [p if p == "hpz" else campaign(p) for p in PLACED])
def test_no_more_gathers_than_each_pass_alone(placement: str) -> None:
    """From the third round on, the three passes in turn issue no more collectives than they do without each other.

    All orders are known by then, and each forward without the critic has at most one exchange.
    """
    world, local, settings = PLACED[placement]
    for found in run_ranks(world, all_rounds, settings, local_world_size=local):
        calls, agreed, messages = found[" ".join(PASSES)]
        alone = sum((found[name][0][-1] for name in PASSES), Counter())
        assert alone, "nothing was counted"
        for number in range(2, ROUNDS):
            assert calls[number] <= alone, f"round {number}: {calls[number] - alone} beyond {alone}"
            assert agreed[number] <= PASSED_OVER, f"round {number}: {agreed[number]} agreements"
        assert not messages, "a known order was given up"
