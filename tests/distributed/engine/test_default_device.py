"""``torch.set_default_device`` changes nothing: tensors that the engine makes for the host are on the host.

The default device "meta" stands for a GPU. A tensor that is made there by mistake cannot be sent, read or written.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.checkpoint_training import CONFIGS
from tests.support.quantized_model import Model, tokens
from tests.support.rank_pool import run_ranks, some
from zeropp import checkpoint


class Own(torch.optim.AdamW):
    """AdamW under another class name, so that wrapping runs a trial step to see if the optimizer is elementwise."""


def trains(folder: Path, name: str, device: str | None) -> list[dict[str, Tensor]]:
    """Wrap, train, save and load under a default device.

    Args:
        folder: folder of the checkpoint.
        name: key of CONFIGS.
        device: default device; None for torch's default.

    Returns:
        Full weights of the trained model, and of a second model that loads the checkpoint.
    """
    model, other = Model(), Model()
    model.head.weight.requires_grad_("frozen" not in name)
    # Fused, because torch's other implementations make their step counters on the default device.
    inner = Own([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    batches = [tokens(step, dist.get_rank()) for step in range(4)]

    def step(index: int) -> None:
        optimizer.backward(model(batches[index]))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    # Set once before wrapping, as scripts of users do, so that every later call runs under it.
    torch.set_default_device(device)
    try:
        optimizer = zeropp.ZeroOptimizer(inner, model, CONFIGS[name])
        optimizer.step_sync.defers_read = True
        step(0)
        step(1)
        assert optimizer.grad_norm
        optimizer.load_state_dict(optimizer.state_dict())
        for asynchronous in (False, True):
            checkpoint.save(folder, model, optimizer, asynchronous=asynchronous)
            checkpoint.wait()
            step(2)
            checkpoint.load(folder, model, optimizer)
        step(3)
        # The second model stores all weights unquantized, also if the checkpoint has frozen weights as codes.
        zeropp.ZeroOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), other, CONFIGS["stage 3"])
        checkpoint.load(folder, other)
        return [zeropp.full_state(model), zeropp.full_state(other)]
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("name", some(["frozen codes", "stage 3", "hpz loco bf16"], 3))
def test_the_default_device_changes_nothing(name: str, tmp_path: Path) -> None:
    there, here = (run_ranks(2, trains, tmp_path / str(d), name, d, local_world_size=2)[0] for d in ("meta", None))
    for one, two in zip(there, here, strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
