"""Fabric with zeropp's strategy on two ranks gives the results of plain torch on the global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.rank_pool import run_ranks, some

LAUNCHED = {"TORCHELASTIC_RUN_ID": "tests"}
WIDTH, STEPS, MICRO = 8, 4, 2


class Net(nn.Module):
    """Residual layers, each of which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def parts(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """Return a model and its optimizer, with weights from a seed."""
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def plain(steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Train in one process on the batches of two ranks, and return the weights and the norms before clipping."""
    model, optimizer = parts(0)
    norms = []
    for step in range(steps):
        for number in range(step * MICRO, (step + 1) * MICRO):
            for rank in range(2):
                (model(batch(number, rank)).square().mean() / (2 * MICRO)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def fabric(stage: int, **more: Any) -> Any:
    """Return a launched Fabric on two ranks.

    Args:
        stage: ZeRO stage.
        **more: ``precision`` for Fabric; all other arguments go to the strategy.
    """
    import lightning.fabric

    from zeropp.integrations.lightning import FabricZeroStrategy

    strategy = FabricZeroStrategy(stage=stage, **{key: more.pop(key) for key in list(more) if key != "precision"})
    strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    strategy.config["zeropp"] = {"unit_min_blocks": 0, "hang_timeout": 20}
    made = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy, **more)
    made.launch()
    return made


def train(made: Any, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Train steps ``first`` to ``last - 1``, and return the norms before clipping."""
    norms = []
    for step in range(first, last):
        for number in range(step * MICRO, (step + 1) * MICRO):
            # Even steps reduce gradients at the end of the window, odd steps after each micro-batch. The sums are
            # equal.
            with made.no_backward_sync(model, enabled=step % 2 == 0 and number % MICRO == 0):
                made.backward(model(batch(number, made.global_rank)).square().mean() / MICRO)
        norms.append(float(made.clip_gradients(model, optimizer, max_norm=0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def in_stages(folder: Path, wanted: dict[str, Tensor], stages: list[int]) -> list[Any]:
    """Train in several stages, with a save and a load into new objects half-way.

    Args:
        folder: folder of the checkpoints.
        wanted: weights of plain torch.
        stages: the stages.

    Returns:
        For each stage, the difference of the weights, the norms, the loaded step, and the loaded objects without a
        target.
    """
    found = []
    for stage in stages:
        made = fabric(stage)
        model, optimizer = made.setup(*parts(dist.get_rank()))
        norms = train(made, model, optimizer, 0, 2)
        made.save(folder / f"{stage}.ckpt", {"model": model, "optimizer": optimizer, "step": 2, "more": {"a": (1, 2)}})
        made = fabric(stage)
        model, optimizer = made.setup(*parts(7))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        rest = made.load(folder / f"{stage}.ckpt", state)
        norms += train(made, model, optimizer, state["step"], STEPS)
        weights = zeropp.full_state(model.module)
        found.append([max(float((weights[n] - wanted[n]).abs().max()) for n in wanted), norms, state["step"], rest])
    return found


@pytest.mark.parametrize("stages", some([[1, 2], [3]], 2), ids=str)
def test_stages_equal_plain_torch(stages: list[int], tmp_path: Path) -> None:
    """Weights agree within 1e-5 after a save and a load, because float32 sums are added in another order."""
    state, norms = plain()
    for found in run_ranks(2, in_stages, tmp_path, state, stages, env=LAUNCHED, timeout=100):
        for distance, told, step, rest in found:
            assert distance < 1e-5 and told == pytest.approx(norms, rel=1e-5)
            assert step == 2 and rest == {"more": {"a": (1, 2)}}


def otherwise(folder: Path) -> list[str]:
    """Return descriptions of failures of all other uses.

    They are precisions, models built in pieces, two models, inference, files with whole weights, and refused calls.
    """
    wrong: list[str] = []

    def look(what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            wrong.append(f"{what}: {found}, expected {wanted}")

    def refuses(what: str, call: Any) -> None:
        try:
            call()
            wrong.append(f"{what} is not refused")
        except Exception as error:
            if what not in str(error):
                wrong.append(f"{what}: {type(error).__name__}: {error}")

    rank = dist.get_rank()
    half = fabric(3, precision="bf16-mixed")
    with half.init_module():
        inner = Net()
        inner.wide = nn.Linear(WIDTH, 9000)
    look("pieces", inner.wide.weight._zeropp_piece.row.numel(), 36000)
    model, optimizer = half.setup(inner, torch.optim.AdamW(inner.parameters(), lr=0.05))
    out = model(batch(0, rank))
    look("dtypes", (out.dtype, inner.layers[0].weight.dtype), (torch.float32, torch.bfloat16))
    half.backward(out.square().mean())
    optimizer.step()
    look("stepped", model._forward_module.global_steps, 1)

    made = fabric(2, load_full_weights=True)
    first, one = made.setup(*parts(rank))
    second, two = made.setup(*parts(rank))
    refuses("say whose loss it is", lambda: made.backward(first(batch(0, rank)).mean()))
    made.backward(second(first(batch(0, rank))).square().mean(), model=second)
    refuses("norm_type is 1.0", lambda: made.clip_gradients(first, one, max_norm=1.0, norm_type=1.0))
    refuses("zeropp clips by norm", lambda: made.clip_gradients(first, one, clip_val=1.0))
    one.step()
    two.step()
    look("both stepped", [each._forward_module.global_steps for each in (first, second)], [1, 1])
    refuses("has 2 models", lambda: made.save(folder / "two", {"a": first, "b": second}))
    refuses("has 0 models", lambda: made.save(folder / "none", {"a": 1}))
    refuses("filter is not in zeropp", lambda: made.save(folder / "x", {"a": first}, filter={"a": bool}))
    made.save(folder / "weights", {"model": first})
    refuses("without an optimizer", lambda: made.load(folder / "weights", {"model": first, "optimizer": one}))
    refuses("has no ['epoch']", lambda: made.load(folder / "weights", {"model": first, "epoch": 1}))
    refuses("gave 2 optimizers (SGD, SGD)", lambda: made.setup(Net(), *(torch.optim.SGD(Net().parameters()),) * 2))
    refuses("does not support setting up the module", lambda: made.setup_optimizers(parts(0)[1]))

    torch.save({"model": parts(5)[0].state_dict(), "epoch": 4}, folder / f"whole-{rank}.pt")
    dist.barrier()
    evaluator = made.setup(Net())
    state = {"model": evaluator, "epoch": 0}
    made.load(folder / "whole-0.pt", state)
    with torch.no_grad():
        gap = (evaluator(batch(1, rank)) - parts(5)[0](batch(1, rank))).abs().max()
    look("whole file", (float(gap) < 1e-6, state["epoch"]), (True, 4))
    return wrong


def test_other_uses_of_fabric_work_or_are_refused(tmp_path: Path) -> None:
    assert run_ranks(2, otherwise, tmp_path, env=LAUNCHED, timeout=100) == [[], []]
