"""Main weights, gradients and states in 16 bits: the same bits as plain torch that steps a 16-bit model itself.

Gradients of ranks are added in float32 and rounded once. Gradients of micro-batches are added in 16 bits, as in
autograd. Means over two or four are exact. Stages 0 and 1 add a rank's micro-batches before they add over ranks; the
other stages add over ranks first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import WIDTH, Routed, make_config, worst
from tests.support.offload_pairs import host_apart
from tests.support.rank_pool import RankFailure, run_ranks
from zeropp import checkpoint
from zeropp.config import UnsupportedConfigError, load_config, require_supported

STEPS, MICROS, SCALE, CLIP = 4, 2, 256, 0.3
BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
FP16 = {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": SCALE}
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def blocks(dtype: torch.dtype) -> dict[str, Any]:
    return {"bf16": BF16} if dtype == torch.bfloat16 else {"fp16": FP16}


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Routed(3).to(dtype).float()


def loss_of(model: nn.Module, dtype: torch.dtype, step: int, micro: int, rank: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return model(torch.randn(3, WIDTH, generator=seed).to(dtype)).float().square().mean()


def steps(model: nn.Module, optimizer: zeropp.ZeroOptimizer, dtype: torch.dtype, first: int, last: int) -> None:
    for step in range(first, last):
        for micro in range(MICROS):
            optimizer.backward(loss_of(model, dtype, step, micro, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()


def trained(name: str, dtype: torch.dtype, settings: dict[str, Any], apart: bool) -> tuple[dict[str, Tensor], set[Any]]:
    """Return the whole weights, and the set of dtypes of main weights, gradients and states."""
    with host_apart(apart):
        model = model_of(dtype)
        config = make_config(**blocks(dtype), gradient_accumulation_steps=MICROS, **settings)
        optimizer = zeropp.ZeroOptimizer(MAKE[name](model.parameters()), model, config)
        steps(model, optimizer, dtype, 0, STEPS)
        states = [value for state in optimizer.state.values() for value in state.values()]
        kept = [*states, *(s for b in optimizer.engine.buffers for s in (b.shard, b.gradient.shard))]  # type: ignore[union-attr]
        dtypes = {value.dtype for value in kept if isinstance(value, Tensor) and value.dim()}
        return zeropp.full_state(model), dtypes


def summed(gradients: list[list[Tensor]], scale: float, held: bool) -> Tensor:
    """Return one parameter's gradient as zeropp adds it.

    Args:
        gradients: gradients by micro-batch and rank.
        scale: loss scale of the gradients.
        held: True to add a rank's micro-batches before adding over ranks, as in stages 0 and 1.
    """
    world, dtype = len(gradients[0]), gradients[0][0].dtype
    if held:
        own = [sum(of_rank[1:], of_rank[0]) for of_rank in zip(*gradients, strict=True)]
        return (sum(each.float() for each in own) / (world * scale)).to(dtype)
    means = [(sum(each.float() for each in of_micro) / (world * scale)).to(dtype) for of_micro in gradients]
    return sum(means[1:], means[0])


def plain(name: str, dtype: torch.dtype, held: bool, clips: bool, world: int) -> dict[str, Tensor]:
    model = model_of(dtype).to(dtype)
    optimizer, params = MAKE[name](model.parameters()), list(model.parameters())
    scale = SCALE if dtype == torch.float16 else 1
    for step in range(STEPS):
        found = [
            [
                torch.autograd.grad(loss_of(model, dtype, step, micro, rank) * scale / MICROS, params)
                for rank in range(world)
            ]
            for micro in range(MICROS)
        ]
        for index, parameter in enumerate(params):
            parameter.grad = summed([[each[index] for each in ranks] for ranks in found], scale, held)
        if clips:
            # The norm of 16-bit gradients is computed in a wider dtype. The clipping factor is rounded to 16 bits.
            norm = torch.cat([parameter.grad.flatten().double() for parameter in params]).norm()
            factor = (CLIP / (norm + 1e-6)).clamp(max=1.0).to(dtype)
            assert factor < 1
            for parameter in params:
                parameter.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


PLACED: dict[str, tuple[dict[str, Any], bool]] = {
    **{f"stage {stage}": ({"stage": stage}, False) for stage in (3, 0, 1, 2)},
    "persistent": ({"persist": 1000}, False),
    "one rank": ({}, False),
    "offload_optimizer": ({"offload_optimizer": {"device": "cpu"}}, True),
    "a part": ({"offload_optimizer": {"device": "cpu", "ratio": 0.4}}, True),
    "clipped": ({"gradient_clipping": CLIP}, False),
    "both": ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, True),
}


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", torch.bfloat16), ("sgd", torch.bfloat16), ("sgd", torch.float16)], ids=str
)
@pytest.mark.parametrize("placed", PLACED)
def test_steps_as_torch_steps_the_model_in_16_bits(placed: str, name: str, dtype: torch.dtype) -> None:
    world = 1 if placed == "one rank" else 2
    wanted = plain(name, dtype, held=placed in ("stage 0", "stage 1"), clips=placed == "clipped", world=world)
    for weights, dtypes in run_ranks(world, trained, name, dtype, *PLACED[placed]):
        assert dtypes == {dtype}
        assert all(value.dtype == dtype for value in weights.values())
        assert worst(weights, wanted) == 0


def restored(folder: Path) -> tuple[float, float, float, set[torch.dtype], set[torch.dtype]]:
    """Save, load and resume training between 16-bit and float32 main weights.

    Returns:
        Difference of a resumed run from an uninterrupted one, of float32 weights from the 16-bit ones that they were
        loaded from, and of 16-bit weights from the float32 ones; then the dtypes of states in 16-bit and in float32
        training after such loads.
    """
    dtype = torch.bfloat16

    def made(**block: Any) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
        model = model_of(dtype)
        config = make_config(**block, gradient_accumulation_steps=MICROS)
        return model, zeropp.ZeroOptimizer(MAKE["adamw"](model.parameters()), model, config)

    model, optimizer = made(bf16=BF16)
    steps(model, optimizer, dtype, 0, 2)
    checkpoint.save(folder / "half", model, optimizer)
    saved = zeropp.full_state(model)
    steps(model, optimizer, dtype, 2, 4)
    again = made(bf16=BF16, stage=1)
    checkpoint.load(folder / "half", *again)
    other, resumed = made(bf16=BF16)
    checkpoint.load(folder / "half", other, resumed)
    steps(other, resumed, dtype, 2, 4)
    single, whole = made(bf16={"enabled": True})
    checkpoint.load(folder / "half", single, whole)
    taken = worst(zeropp.full_state(single), saved)
    steps(single, whole, dtype, 2, 3)
    checkpoint.save(folder / "single", single, whole)
    checkpoint.load(folder / "single", *again)
    given = {name: value.to(dtype) for name, value in zeropp.full_state(single).items()}
    loaded = zeropp.full_state(again[0])
    # Both optimizers go on with states of their own dtype, although they loaded states of another dtype.
    steps(*again, dtype, 3, 4)
    kinds = [
        {s.dtype for state in each.state.values() for s in state.values() if s.dim()} for each in (again[1], whole)
    ]
    return worst(zeropp.full_state(other), zeropp.full_state(model)), taken, worst(loaded, given), kinds[0], kinds[1]


def test_checkpoints_resume_and_change_between_32_and_16_bits(tmp_path: Path) -> None:
    for found in run_ranks(2, restored, tmp_path):
        assert found == (0.0, 0.0, 0.0, {torch.bfloat16}, {torch.float32})


def edited() -> float:
    """Set a weight to a number that bfloat16 cannot represent, and return the weight's largest element."""
    model = model_of(torch.bfloat16)
    optimizer = zeropp.ZeroOptimizer(MAKE["adamw"](model.parameters()), model, make_config(bf16=BF16))
    optimizer.backward(loss_of(model, torch.bfloat16, 0, 0, 0))
    optimizer.step()
    weight = next(model.parameters())
    # bfloat16 rounds 1 + 2**-9 to 1, because its next number after 1 is 1 + 2**-7.
    with torch.no_grad(), zeropp.zero.GatheredParameters([weight], modifier_rank=0):
        weight.fill_(1 + 2**-9)
    return float(zeropp.full_state(model)["blocks.0.lin.weight"].max())


def test_edits_are_rounded_to_16_bits() -> None:
    assert run_ranks(2, edited) == [1.0] * 2


def refused() -> None:
    model = model_of(torch.float16)
    inner = torch.optim.AdamW(model.parameters())
    zeropp.ZeroOptimizer(inner, model, make_config(fp16=FP16))


def test_combinations_that_are_refused() -> None:
    for failure in run_ranks(2, refused, catch=True):
        assert isinstance(failure, RankFailure) and failure.is_a(ValueError)
        assert "has AdamW keep its states in float16" in failure.message
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    for block, text in (
        ({"bf16": {**BF16, "bf16_optimizer_states": False}}, "grads: true without bf16.bf16_optimizer_states is not"),
        ({"bf16": {**BF16, "bf16_master_weights_and_grads": False}}, "states: true without bf16.bf16_master"),
        ({"bf16": {**BF16, "enabled": False}}, "without bf16.enabled"),
        ({"fp16": {**FP16, "enabled": False}}, "without fp16.enabled"),
        ({"bf16": BF16, "zeropp": {"weight_codec": "delta4"}}, "main weights are in 16 bits"),
    ):
        with pytest.raises(UnsupportedConfigError, match=text):
            require_supported(load_config({"zero_optimization": zero, **block}))
