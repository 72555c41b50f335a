"""With offload, copies between device and host run beside collectives, in both directions."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from zeropp.comm.hops import Hop
from zeropp.offload.read_ahead import GdsTensor, PendingRead
from zeropp.params.gradient import Gradient

LONG = 20.0  # seconds


def trained(held: str, settings: dict[str, Any]) -> tuple[int, int, list[float]]:
    """Train three steps. Once, block one piece of work until the next unit's work of the other kind begins.

    Args:
        held: "gather" blocks a collective until the next unit's copy to the device begins. "store" blocks a copy to
            the host until the next unit's reduction begins. "nothing" blocks nothing.
        settings: settings of the configuration.

    Returns:
        Number of times work was blocked, number of times the block ended by its time limit, and losses.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
    copies = reductions = holds = vain = 0
    begun = threading.Condition()

    def hold(count: Any) -> None:
        """Block until the count rises, at most ``LONG`` seconds."""
        nonlocal holds, vain
        before = count()
        holds += 1
        with begun:
            vain += not begun.wait_for(lambda: count() > before, LONG)

    def all_gather(self: Hop, *args: Any, **kwargs: Any) -> None:
        # Block the second gather of a training step, because prefetch has queued another gather behind it.
        if held == "gather" and training and self.kind == "gather" and not holds and copies >= 2:
            hold(lambda: copies)
        gather(self, *args, **kwargs)

    def noted(copy: Any) -> Any:
        def copy_to(self: Any, target: torch.Tensor) -> None:
            nonlocal copies
            with begun:
                copies += training
                begun.notify_all()
            copy(self, target)

        return copy_to

    def all_to_all(self: Hop, *args: Any, **kwargs: Any) -> object:
        nonlocal reductions
        with begun:
            reductions += 1
            begun.notify_all()
        return exchange(self, *args, **kwargs)

    def store_in_file(self: Gradient, total: torch.Tensor) -> None:
        if held == "store" and not holds:
            hold(lambda: reductions)
        store(self, total)

    gather, exchange, store = Hop.all_gather, Hop.all_to_all, Gradient._store_in_file
    training, losses = False, []
    with (
        mock.patch.object(Hop, "all_gather", all_gather),
        mock.patch.object(PendingRead, "copy_to", noted(PendingRead.copy_to)),
        mock.patch.object(GdsTensor, "copy_to", noted(GdsTensor.copy_to)),
        mock.patch.object(Hop, "all_to_all", all_to_all),
        mock.patch.object(Gradient, "_store_in_file", store_in_file),
    ):
        optimizer = zeropp.ZeroOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2), model, make_config(hang_timeout=60, **settings)
        )
        for number in range(3):
            training = number > 0  # the first step learns the order, so nothing is prefetched in it
            loss = model(torch.ones(2, 256)).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return holds, vain, losses


@pytest.mark.parametrize("held", ["gather", "store"])
def test_copies_go_on_beside_collectives(held: str, tmp_path: Any) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings = {
        "aio": {"block_size": 4096},
        "stage": 3,
        "reuse": 0,
        "prefetch": 250_000,
        "offload_optimizer": nvme,
        "offload_param": {**nvme, "max_in_cpu": 0},
    }
    # Offload to files. On CPU, host memory is the memory of the training device, so nothing would be copied.
    expected = run_ranks(2, trained, "nothing", settings)
    for (holds, vain, losses), (_, _, plain) in zip(run_ranks(2, trained, held, settings), expected, strict=True):
        assert (holds, vain) == (1, 0), "the other kind of work did not begin while this work was blocked"
        assert losses == plain
