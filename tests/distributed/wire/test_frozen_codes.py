"""Frozen weights that are stored as 8-bit codes only: the values that ranks compute with, memory, saving and edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.owned_memory import owned_bytes
from tests.support.quantized_model import Model, decoded, tokens
from tests.support.rank_pool import run_ranks
from tests.support.used_weights import watch_weights

CODED = {"zero_quantized_nontrainable_weights": True}
PLACED: dict[str, dict[str, object]] = {
    "stage 3": {},
    "one unit": {"unit_min_blocks": 1000},
    "persistent": {"persist": 10**6},
    "hpz": {"zero_hpz_partition_size": 2},
    "hpz, codes": {"zero_hpz_partition_size": 2, "secondary": "codes"},
    "hpz, differences": {"zero_hpz_partition_size": 2, "weight_codec": "lossless", "bf16": {"enabled": True}},
    "mics": {"mics_shard_size": 2},
    "stage 1": {"stage": 1},
    "bf16, all quantized": {"bf16": {"enabled": True}, "zero_quantized_weights": True},
}


def lora() -> Model:
    """Return a model in which the blocks' norms and the head's bias are trained, and all else is frozen."""
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[-2:-1] == ["1"] or name == "head.bias")
    return model


def wrapped(settings: dict[str, object]) -> tuple[Model, Any]:
    """Return a model with frozen codes, and its optimizer."""
    model = lora()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, zeropp.ZeroOptimizer(torch.optim.SGD(trained, lr=0.1), model, make_config(**{**CODED, **settings}))


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(tokens(step, dist.get_rank())).backward()
    optimizer.step()


def frozen_seen(settings: dict[str, object]) -> list[str]:
    """Return the frozen parameters whose values differ from their decoded codes, and buffers that are not codes.

    Values are checked in forward, in backward, and in the full state.
    """
    original = {name: p.detach().clone() for name, p in lora().named_parameters() if not p.requires_grad}
    model, optimizer = wrapped(settings)
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    wrong = [b.unit for b in optimizer.engine.buffers if not b.trainable and b.shard.dtype != torch.uint8]

    def look(name: str, parameter: nn.Parameter, _: bool) -> None:
        if name in original and not torch.equal(parameter, decoded(original[name]).to(dtype)):
            wrong.append(name)

    watch_weights(model, look)
    for step in range(2):
        train(model, optimizer, step)
    state = zeropp.full_state(model)
    # conv.weight is channels_last, and blocks of codes follow the order of memory.
    conv = decoded(original["conv.weight"].permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    wrong += [n for n, v in original.items() if n != "conv.weight" and not torch.equal(state[n], decoded(v))]
    return wrong + ["conv.weight"] * (not torch.equal(state["conv.weight"], conv))


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("world", "name"),
    [(w, n) for w in (1, 2, 4) for n in PLACED if (w, n) not in ((1, "mics"), (2, "hpz, differences"))],
)
def test_every_rank_computes_with_the_decoded_codes(world: int, name: str) -> None:
    results = run_ranks(world, frozen_seen, PLACED[name], local_world_size=min(world, 2))
    assert results == [[]] * world


def owned(settings: dict[str, object]) -> tuple[dict[str, int], dict[str, int]]:
    """Return this rank's bytes by term after one step, and the bytes that ``zeropp.plan.memory`` predicts."""
    plan = zeropp.plan.memory(lora(), make_config(**{**CODED, **settings}), dist.get_world_size(), 2)
    model, optimizer = wrapped(settings)
    train(model, optimizer, 0)
    optimizer.engine.wait_for_refresh()
    optimizer.engine.release_prefetched()
    # Gradients stay until zero_grad().
    return owned_bytes(optimizer), {**plan.terms, "gradients": plan.gradients}


@pytest.mark.every(8)
@pytest.mark.parametrize("name", PLACED)
def test_owned_bytes_equal_the_plan(name: str) -> None:
    for found, planned in run_ranks(4, owned, PLACED[name], local_world_size=2):
        assert {**planned, "gathered": 0, "held_gradients": 0} == found
        assert found["frozen_weights"] > 0


def shards(optimizer: Any) -> list[Tensor]:
    """Return copies of this rank's frozen shards."""
    return [buffer.shard.clone() for buffer in optimizer.engine.buffers if not buffer.trainable]


def moved(settings: dict[str, object]) -> list[str]:
    """Save, load, replace, edit and partly unfreeze codes, and return descriptions of wrong values."""
    model, optimizer = wrapped(settings)
    train(model, optimizer, 0)
    wrong, before = [], shards(optimizer)

    model.load_state_dict(model.state_dict())
    if not all(map(torch.equal, before, shards(optimizer))):
        wrong.append("codes changed when their own values were loaded")

    new = {name: value * 1.3 + 0.01 for name, value in zeropp.full_state(model).items()}
    model.load_state_dict(new)
    state = zeropp.full_state(model)
    loaded = ("table.weight", "head.weight")
    wrong += [f"{name} after a load" for name in loaded if not torch.equal(state[name], decoded(new[name]))]

    before = shards(optimizer)
    with zeropp.zero.GatheredParameters(model.head.weight, modifier_rank=0), torch.no_grad():
        model.head.weight[5] = 3.0
    state = zeropp.full_state(model)
    held = decoded(new["head.weight"])
    edited = held.index_fill(0, torch.tensor([5]), 3.0)
    same = torch.ones(-(-held.numel() // 256) * 256, dtype=torch.bool)
    same[: held.numel()] = (held == edited).view(-1)
    same = same.view(-1, 256).all(1).repeat_interleave(256)[: held.numel()].view(held.shape)
    if not torch.equal(state["head.weight"], torch.where(same, held, decoded(edited))):
        wrong.append("head.weight after an edit: only the edited block may change")

    model.blocks[1][0].weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model.blocks[1][0].weight]})
    train(model, optimizer, 1)
    after = zeropp.full_state(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    wrong += [f"{n} after another was unfrozen" for n in frozen if not torch.equal(after[n], state[n])]
    if torch.equal(after["blocks.1.0.weight"], state["blocks.1.0.weight"]):
        wrong.append("the unfrozen weight was not trained")
    train(model, optimizer, 2)
    return wrong


@pytest.mark.every(6)
@pytest.mark.parametrize("name", ["stage 3", "one unit", "hpz", "hpz, codes", "persistent"])
@pytest.mark.parametrize("world", [1, 4])
def test_codes_are_moved_and_not_encoded_again(world: int, name: str) -> None:
    """Decoding and encoding again could change codes, so codes must be kept wherever the values stay the same."""
    assert run_ranks(world, moved, PLACED[name], local_world_size=min(world, 2)) == [[]] * world
