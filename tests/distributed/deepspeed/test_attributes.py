"""DeepSpeed's attributes of parameters and modules, such as ``ds_id`` and ``ds_tensor``, as scripts use them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.gathered_model import PLACED, Stack, data, lent
from tests.support.rank_pool import run_ranks, some
from tests.support.zero_init_model import limits
from zeropp.zero import GatheredParameters, ZeroParamStatus, register_external_parameter


def whole_of(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's whole values on the CPU, as a helper function found in many training scripts does."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().cpu().clone()
    needs = parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
    with GatheredParameters([parameter] if needs else []):
        return parameter.data.detach().cpu().clone()


def statuses(settings: dict[str, Any]) -> tuple[float, list[Any]]:
    pair = lent(settings)
    pair.train()
    known = zeropp.full_state(pair.model)
    found = {name: whole_of(parameter) for name, parameter in pair.model.named_parameters()}
    weight = pair.model.blocks[0].lin.weight
    seen = [weight.ds_status]
    handle = pair.model.blocks[0].lin.register_forward_hook(lambda *_: seen.append(weight.ds_status))
    pair.model(data(0, 0))
    handle.remove()
    seen.append(weight.ds_status)
    with GatheredParameters(pair.model):
        seen.append(weight.ds_status)
    return worst(found, known), seen


@pytest.mark.every(8)
@pytest.mark.parametrize("name", [name for name in PLACED if name not in ("stage 0", "stage 1")])
def test_ds_status_shows_which_parameters_must_be_gathered(name: str) -> None:
    for distance, seen in run_ranks(4, statuses, PLACED[name], local_world_size=2):
        assert distance == 0
        assert [status.name for status in seen] == ["NOT_AVAILABLE", "AVAILABLE", "NOT_AVAILABLE", "AVAILABLE"]


def below() -> bool:
    pair = lent({"stage": 2})
    return hasattr(pair.model.conv.weight, "ds_id") or hasattr(pair.model.conv, "ds_external_parameters")


def test_nothing_is_carried_where_nothing_is_partitioned() -> None:
    assert run_ranks(2, below) == [False, False]


def carried(settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    pair = lent(settings)
    pair.train()
    rows = []
    for parameter in pair.model.parameters():
        if not hasattr(parameter, "ds_id"):
            continue
        parameter.ds_active_sub_modules.clear()
        part = parameter.ds_tensor
        assert part.numel() == part.ds_numel == parameter.partition_numel() == part.data.numel()
        assert part.device.type == "cpu" and part.status == ZeroParamStatus.AVAILABLE
        # Scripts move parts to the host and back between phases.
        part.data = part.data.to("cpu", copy=True)
        with pytest.raises(RuntimeError, match="other values than it has"):
            part.data = part.data + 1 if part.ds_numel else torch.ones(1)
        rows.append((parameter.ds_id, parameter.ds_shape, parameter.ds_numel, part.data.clone()))
    return rows


@pytest.mark.parametrize("settings", some([{"persist": 100}, {}], 2), ids=str)
def test_parts_of_all_ranks_are_the_whole(settings: dict[str, Any]) -> None:
    """The sizes of the ranks' parts add up to the parameter.

    Parts are in memory order, which differs for channels_last weights.
    """
    plain = [p for p in Stack().parameters() if p.is_floating_point()]
    for row in zip(*run_ranks(2, carried, settings), strict=True):
        assert row[0][1:3] == row[1][1:3]
        assert sum(part.numel() for *_, part in row) in (row[0][2], 2 * row[0][2])
    numbers = [[number for number, *_ in rows] for rows in run_ranks(2, carried, settings)]
    assert len(set(numbers[0])) == len(numbers[0]) == len(plain)


def unfrozen() -> list[tuple[int, int]]:
    pair = lent({})
    frozen = pair.model.blocks[1].lin.weight
    before = frozen.ds_tensor.data.clone()
    frozen.requires_grad_(True)
    pair.model(data(0, 0))
    after = frozen.ds_tensor.data
    return [(after.numel(), int(before.sum() * 1000) - int(after.sum() * 1000))]


def test_parts_of_an_unfrozen_parameter_cover_it() -> None:
    first, second = run_ranks(2, unfrozen)
    assert first[0][0] + second[0][0] == 256


def external() -> list[Any]:
    pair = lent({})
    weight = pair.model.conv.weight
    register_external_parameter(pair.model.blocks[0], weight)
    return [[p is weight for _, p in module.ds_external_parameters()] for module in pair.model.modules()]


def test_registered_parameters_are_listed() -> None:
    lists = run_ranks(1, external)[0]
    assert [each for each in lists if each] == [[True]] and len(lists) > 5


def dropped() -> tuple[bool, bool]:
    model = Stack()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    part, gone = model.conv.weight.ds_tensor, weakref.ref(optimizer.engine)
    gc.disable()
    try:
        del model, optimizer
        with pytest.raises(RuntimeError, match="its model was dropped"):
            part.numel()
        return gone() is None, dist.is_initialized()
    finally:
        gc.enable()


def test_they_keep_nothing_alive() -> None:
    assert run_ranks(1, dropped) == [(True, True)]


def closed() -> list[bool]:
    pair = lent({})
    pair.optimizer.close()
    return [hasattr(module, "ds_external_parameters") for module in pair.model.modules()]


def test_closing_takes_them_off_modules() -> None:
    assert not any(run_ranks(1, closed)[0])


class Built(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lin = nn.Embedding(30, 10), nn.Linear(10, 7)


def built(stage: int, small: int) -> dict[str, Any]:
    """Build a model in ``zero.Init``, read DeepSpeed's attributes, and wrap the model.

    Args:
        stage: ZeRO stage of the wrapped model.
        small: number of elements up to which a parameter stays whole.

    Returns:
        "far": largest difference from a plain build; "statuses": names of ``ds_status``; "parts": this rank's part of
        each parameter; "left": DeepSpeed's attributes of one weight after wrapping; "kept": True if ``ds_id`` is
        unchanged, or the stage is below 3.
    """
    torch.manual_seed(dist.get_rank())
    with limits(small, small), zeropp.zero.Init():
        model = Built()
    torch.manual_seed(0)
    plain = Built()
    named = list(model.named_parameters())
    assert all(hasattr(p, "ds_id") and p.ds_shape == p.shape and p.ds_numel == p.numel() for _, p in named)
    statuses = {parameter.ds_status.name for _, parameter in named}
    parts = {}
    for name, parameter in named:
        part = parameter.ds_tensor
        assert part.data.numel() == part.ds_numel == parameter.partition_numel() and part.dtype == torch.float32
        part.data = part.data.clone()
        with pytest.raises(RuntimeError, match="other values than it has"):
            part.data = part.data + 1
        parts[name] = part.data.clone()
    with GatheredParameters(model.parameters()):
        assert {parameter.ds_status.name for _, parameter in named} == {"AVAILABLE"}
    found = {name: whole_of(parameter) for name, parameter in named}
    numbers = [parameter.ds_id for _, parameter in named]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    zeropp.ZeroOptimizer(inner, model, make_config(stage=stage))
    return {
        "far": worst(found, dict(plain.state_dict())),
        "statuses": statuses,
        "parts": parts,
        "left": [name for name in vars(model.lin.weight) if name.startswith("ds_")],
        "kept": stage < 3 or numbers == [parameter.ds_id for parameter in model.parameters()],
    }


@pytest.mark.parametrize(("stage", "small"), [(3, 0), (3, 1 << 16), (1, 0)])
def test_models_built_in_pieces_have_the_attributes_before_wrapping(stage: int, small: int) -> None:
    torch.manual_seed(0)
    first, second = run_ranks(2, built, stage, small)
    for found in (first, second):
        # Small parameters stay whole, but report the same status.
        assert found["far"] == 0 and found["kept"] and found["statuses"] == {"NOT_AVAILABLE"}
        assert bool(found["left"]) == (stage == 3)
    for name, value in Built().state_dict().items():
        assert torch.equal(torch.cat([first["parts"][name], second["parts"][name]]), value.flatten())
