"""Edits between steps of tensors in ``optimizer.param_groups`` change main weights, and the next forward uses them."""

from __future__ import annotations

import copy
import pickle
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import apart, logged, make_config, worst
from tests.support.rank_pool import RankError, run_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {},
    "kept gathered": {"live": 10**9, "reuse": 10**9, "prefetch": 10**9},
    "persistent": {"persist": 10**6},
    "some persistent": {"persist": 64},
    "hpz": {"zero_hpz_partition_size": 2},
    "mics": {"mics_shard_size": 2},
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "offload 3": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "bf16": {"stage": 2, "bf16": {"enabled": True}},
    "bf16 hpz": {"zero_hpz_partition_size": 2, "bf16": {"enabled": True}},
    "bf16 offload": {
        "bf16": {"enabled": True}, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
    },
    "lossless": {"zero_hpz_partition_size": 2, "bf16": {"enabled": True}, "weight_codec": "lossless"},
    "delta": {"zero_hpz_partition_size": 2, "bf16": {"enabled": True}, "weight_codec": "delta4"},
}  # fmt: skip


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return one group of weights and one of biases. The model is so small that some ranks have no slice in a group."""
    by_rank = {rank: [p for p in model.parameters() if p.dim() == rank] for rank in (2, 1)}
    return [{"params": by_rank[2], "weight_decay": 0.1}, {"params": by_rank[1]}]


def batch(step: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


def tensors(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def scale(optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in tensors(optimizer):
            parameter.mul_(0.5)


def scale_foreach(optimizer: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            torch._foreach_mul_(group["params"], 0.5)


def scale_data(optimizer: Any) -> None:
    for parameter in tensors(optimizer):
        parameter.data.mul_(0.5)


def scale_in_inference_mode(optimizer: Any) -> None:
    with torch.inference_mode():
        for parameter in tensors(optimizer):
            parameter.data.mul_(0.5 if float(parameter.data.abs().max()) >= 0 else 1.0)


def put_data(optimizer: Any) -> None:
    for parameter in tensors(optimizer):
        parameter.data = parameter.data * 0.5


def scale_biases(optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[1]["params"]:
            parameter.add_(0.25)


EDITS: dict[str, Callable[[Any], None]] = {
    "in place": scale, "foreach": scale_foreach, "data": scale_data, "other data": put_data, "a group": scale_biases,
    "inference mode": scale_in_inference_mode,
}  # fmt: skip


def climb(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    moved = [(p, p.grad * 0.5) for p in tensors(optimizer) if p.grad is not None]
    with torch.no_grad():
        for parameter, way in moved:
            parameter.add_(way)
    return moved


def come_back(moved: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, way in moved:
            parameter.sub_(way)


def train(model: nn.Module, optimizer: Any, cast: torch.dtype | None) -> list[Tensor]:
    """Take steps of SAM (two backwards, the second at perturbed weights), and make each kind of edit between them.

    Args:
        model: sharded or plain model.
        optimizer: its optimizer.
        cast: dtype in which a plain model computes; None for a sharded model.

    Returns:
        Outputs at perturbed weights and after each edit.
    """

    def output(step: int) -> Tensor:
        if cast is None:
            return model(batch(step))
        # As in a sharded model: forward uses rounded weights, and gradients and steps are float32.
        rounded = {name: value.to(cast) for name, value in model.named_parameters()}
        return torch.func.functional_call(model, rounded, (batch(step).to(cast),))

    found = []
    for step, edit in enumerate(EDITS.values()):
        for _ in range(2 if step == 0 else 1):
            output(step).float().square().mean().backward()
            moved = climb(optimizer)
            found.append(output(step).detach())
            optimizer.zero_grad()
            output(step).float().square().mean().backward()
            come_back(moved)
            optimizer.step()
            optimizer.zero_grad()
        edit(optimizer)
        with torch.no_grad():
            found.append(output(step))
        scale(optimizer)
        edit(optimizer)
        found.append(output(step).detach())
    return found


def make_sharded(settings: dict[str, Any]) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    model = make_model()
    inner = torch.optim.AdamW(groups_of(model), lr=0.01, eps=1e-3)
    return model, zeropp.ZeroOptimizer(inner, model, make_config(**settings))


def sharded(settings: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, optimizer = make_sharded(settings)
    return train(model, optimizer, None), zeropp.full_state(model)


def plain(cast: torch.dtype | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = make_model()
    return train(model, torch.optim.AdamW(groups_of(model), lr=0.01, eps=1e-3), cast), model.state_dict()


WORLDS = {
    1: ["offload", "stage 2", "stage 3", "bf16"],
    2: ["stage 0", "stage 3", "persistent", "bf16", "stage 1", "stage 2", "kept gathered", "offload", "offload 3"],
    # In stages 2 and 3, rank 2 has no slice of any weight matrix, and rank 0 has no slice of any bias.
    3: ["stage 2", "bf16 offload", "stage 0", "stage 3", "some persistent", "offload 3"],
    4: ["mics", "delta", "hpz", "bf16 hpz", "lossless"],
}
# Number of the first rows of each world that run by default. The other rows run in the campaign.
DEFAULT = {1: 1, 2: 3, 3: 2, 4: 2}
ROWS = [
    pytest.param(world, name, marks=() if index < DEFAULT[world] else pytest.mark.campaign)
    for world, names in WORLDS.items()
    for index, name in enumerate(names)
]


@pytest.mark.parametrize(("world", "name"), ROWS)
def test_edits_are_computed_with(world: int, name: str) -> None:
    settings = SETTINGS[name]
    bound = 1e-1 if name == "delta" else 2e-2 if "bf16" in settings else 1e-5
    outputs, weights = plain(torch.bfloat16 if "bf16" in settings else None)
    for found, state in run_ranks(world, sharded, settings, local_world_size=2 if world == 4 else None):
        for position, (own, expected) in enumerate(zip(found, outputs, strict=True)):
            assert apart(own, expected) < bound, position
        assert worst(state, weights) < bound


class Assigning(torch.optim.Optimizer):
    """Gradient descent that assigns a new tensor to ``parameter.data``, as optimizers written by hand do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


def put(optimizer: Any, values: list[Tensor]) -> None:
    for parameter, value in zip(tensors(optimizer), values, strict=True):
        parameter.data = value


def exchanged(model: nn.Module, optimizer: Any, whole: Callable[[], dict[str, Tensor]]) -> list[Tensor]:
    """Assign new tensors to ``.data`` of all weights, and later the old tensors again.

    The tensors are exchanged for evaluations, in steps of SAM, around a plain step, and before a load.

    Args:
        model: sharded or plain model.
        optimizer: its optimizer.
        whole: returns the full weights by name.

    Returns:
        All outputs and weights that were read, in order.
    """
    start, found = whole(), []
    for step in range(3):
        model(batch(step)).square().mean().backward()
        kept = [parameter.data for parameter in tensors(optimizer)]
        put(optimizer, [p.data if p.grad is None else p.data + 0.1 * p.grad for p in tensors(optimizer)])
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        put(optimizer, kept)
        optimizer.step()
        optimizer.zero_grad()
        kept, averages = [p.data for p in tensors(optimizer)], [p.detach() * 0.5 for p in tensors(optimizer)]
        for size in (0.1, 0.2):  # as for a plot of the loss around the weights
            put(optimizer, [value + size for value in kept])
            found.append(model(batch(step)).detach())
            put(optimizer, averages)
            with torch.no_grad():
                found += [model(batch(step)), *whole().values(), *(v.clone() for v in model.state_dict().values())]
            put(optimizer, kept)
            found += [*whole().values(), model(batch(step)).detach()]
    kept = [parameter.data for parameter in tensors(optimizer)]
    put(optimizer, [value * 0.5 for value in kept])
    model(batch(7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    put(optimizer, kept)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data = parameter.data * 2
        found += [*whole().values(), model(batch(8)).detach()]
        model(batch(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    put(optimizer, [p.data * 2 for p in tensors(optimizer)])
    model.load_state_dict(start)
    return [*found, model(batch(9)).detach(), *whole().values()]


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "own": lambda groups: Assigning(groups, 0.1),
}
EXCHANGED = [(2, "stage 0"), (2, "stage 2"), (3, "stage 3"), (4, "hpz"), (2, "kept gathered"), (2, "offload 3")]


def exchanged_here(settings: dict[str, Any], name: str) -> list[Tensor]:
    model = make_model()
    optimizer = zeropp.ZeroOptimizer(OPTIMIZERS[name](groups_of(model)), model, make_config(**settings))
    return exchanged(model, optimizer, lambda: zeropp.full_state(model))


@pytest.mark.every(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("world", "name"), EXCHANGED)
def test_tensors_in_the_place_of_weights(world: int, name: str, optimizer: str) -> None:
    model = make_model()
    wanted = exchanged(model, OPTIMIZERS[optimizer](groups_of(model)), lambda: copied(model.state_dict()))
    nodes = 2 if world == 4 else None
    for found in run_ranks(world, exchanged_here, SETTINGS[name], optimizer, local_world_size=nodes):
        for position, (own, expected) in enumerate(zip(found, wanted, strict=True)):
            assert apart(own, expected) < 1e-5, position


def looked_ahead(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Train with Lookahead, whose slow weights are entries of ``optimizer.state``, and empty the state once.

    Returns:
        Outputs after each step.
    """
    found = []
    for parameter in tensors(optimizer):
        if not len(optimizer.state[parameter]):
            optimizer.state[parameter]["first"] = parameter.detach().clone()
    for parameter in tensors(optimizer):
        del optimizer.state[parameter]["first"]
    for step in range(6):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in tensors(optimizer):
            state = optimizer.state[parameter]
            assert len(state) == ("slow" in state) + ("momentum_buffer" in optimizer.state.get(parameter))
            if "slow" not in state:
                state["slow"] = parameter.data.clone()
            elif step % 2:
                state["slow"].add_(parameter.data - state["slow"], alpha=0.5)
                parameter.data.copy_(state["slow"])
        found.append(model(batch(step)).detach())
        if step == 3:
            optimizer.state_dict()  # must not remove the user's entries
        if step == 4:
            optimizer.state = defaultdict(dict)
    return found


def looked_ahead_here(settings: dict[str, Any]) -> list[Tensor]:
    model = make_model()
    inner = OPTIMIZERS["momentum"](groups_of(model))
    return looked_ahead(model, zeropp.ZeroOptimizer(inner, model, make_config(**settings)))


@pytest.mark.every(2)
@pytest.mark.parametrize(("world", "name"), [(2, "stage 0"), (3, "stage 2"), (2, "stage 3"), (2, "persistent")])
def test_weights_that_the_user_keeps_in_the_state(world: int, name: str) -> None:
    model = make_model()
    wanted = looked_ahead(model, OPTIMIZERS["momentum"](groups_of(model)))
    for found in run_ranks(world, looked_ahead_here, SETTINGS[name]):
        assert [apart(own, expected) < 1e-5 for own, expected in zip(found, wanted, strict=True)] == [True] * 6


def penalized(settings: dict[str, Any], when: str) -> str:
    """Run backward through a penalty on tensors of the groups, and take a step without it afterwards.

    Args:
        settings: keys for ``make_config``.
        when: "before" or "after" the backward of the loss, or "in the loss".

    Returns:
        The error that the penalty leads to.
    """
    model = make_model()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(groups_of(model), lr=0.1), model, make_config(**settings))
    loss: Tensor = model(batch(0)).square().mean()
    penalty: Any = sum(parameter.square().sum() for parameter in tensors(optimizer))
    with pytest.raises(RuntimeError) as caught:
        if when == "before":
            penalty.backward()
        (loss + penalty if when == "in the loss" else loss).backward()
        if when == "after":
            penalty.backward()
        optimizer.step()
    optimizer.zero_grad()
    model(batch(1)).square().mean().backward()
    optimizer.step()
    return str(caught.value)


@pytest.mark.every(4)
@pytest.mark.parametrize("when", ["in the loss", "before", "after"])
@pytest.mark.parametrize(("world", "name"), [(2, "stage 0"), (3, "stage 2"), (2, "stage 3")])
def test_penalties_on_tensors_of_the_groups(world: int, name: str, when: str) -> None:
    for said in run_ranks(world, penalized, SETTINGS[name], when):
        assert "a loss has a term that was computed with them" in said


def slowly_agreed(settings: dict[str, Any]) -> list[float]:
    """Edit weights right after a step, while ranks still agree on the sizes of refresh messages. The agreement is slow.

    Returns:
        For each step, the difference between the output and that of a plain model with the full main weights.
    """
    model, optimizer = make_sharded(settings)
    twin, off = make_model(), []
    comm = optimizer.engine.comm
    largest = comm.largest

    def slow(tensor: Tensor, kind: str) -> None:
        largest(tensor, kind)
        time.sleep(0.15)

    comm.largest = slow  # type: ignore[method-assign]
    for step in range(2):
        model(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (scale if step % 2 else scale_foreach)(optimizer)
        out = model(batch(step)).detach()
        twin.load_state_dict(zeropp.full_state(model))
        off.append(apart(out, twin(batch(step)).detach()))
    return off


def test_edits_wait_until_the_sizes_of_messages_are_no_longer_needed() -> None:
    settings = {"stage": 2, "bf16": {"enabled": True}, "weight_codec": "lossless"}
    settings = {"stage": 2, "overlap_comm": True, "bf16": {"enabled": True}, "weight_codec": "lossless"}
    assert max(max(off) for off in run_ranks(2, slowly_agreed, settings)) < 2e-2


def edited_first(settings: dict[str, Any], which: str) -> tuple[str, list[float]]:
    """Make an edit between two forwards that other ranks cannot see.

    Other ranks see an edit only if it also changes the last two tensors of each group, the markers.

    Args:
        settings: keys for ``make_config``.
        which: "first" adds to the first tensor of the groups, "set" assigns to its ``.data``, and "one rank" edits all
            slices of rank 0.

    Returns:
        The error of the step, "" if none, and differences: of main weights before and after that step (0 for "set"), of
        outputs from a plain model with the full main weights after that step, and the same after one more step.
    """
    model, optimizer = make_sharded(settings)
    twin, before = copy.deepcopy(make_model()), zeropp.full_state(model)
    model(batch(0)).square().mean().backward()
    first = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        if which == "first":
            first.add_(1)
        elif which == "set":
            first.data = first.data + 1
        elif which == "one rank":
            # Edit the slices, but not the markers at the end of each group, which would show the edit to all ranks.
            for part in optimizer.slices.stepped if dist.get_rank() == 0 else ():
                part.parameter.add_(1)
    edited = zeropp.full_state(model)
    assert which == "set" or worst(before, edited) > 0.5
    model(batch(1)).square().mean().backward()
    error = ""
    try:
        optimizer.step()
    except RuntimeError as caught:
        error = str(caught)
    after = zeropp.full_state(model)
    twin.load_state_dict(after)
    assert worst(before, after) > 0.5
    off = [0.0 if which == "set" else worst(edited, after), apart(model(batch(2)).detach(), twin(batch(2)).detach())]
    # A step that was refused, or that took the edit, must not stop the next step.
    optimizer.zero_grad()
    model(batch(3)).square().mean().backward()
    optimizer.step()
    twin.load_state_dict(zeropp.full_state(model))
    return error, [*off, apart(model(batch(4)).detach(), twin(batch(4)).detach())]


@pytest.mark.every(4)
@pytest.mark.parametrize("which", ["first", "set", "one rank"])
@pytest.mark.parametrize(("name", "world"), [("stage 1", 2), ("persistent", 3), ("offload", 2)])
def test_edits_that_some_ranks_miss_are_refused_on_every_rank(name: str, world: int, which: str) -> None:
    for error, off in run_ranks(world, edited_first, SETTINGS[name], which):
        assert "GatheredParameters" in error and "0.weight" in error
        assert off[0] == 0.0 and max(off) < 1e-6


def test_edits_of_some_tensors_follow_where_nothing_is_cached() -> None:
    for error, off in run_ranks(2, edited_first, SETTINGS["stage 3"], "first"):
        assert not error and off[0] > 0 and max(off[1:]) < 1e-6


def test_some_tensors_in_the_place_of_weights_are_refused_where_nothing_is_cached() -> None:
    for error, off in run_ranks(2, edited_first, SETTINGS["stage 3"], "set"):
        assert "0.weight" in error and max(off) < 1e-6


def replaced_in_files(folder: str) -> tuple[dict[str, Tensor], bool]:
    """Assign doubled values to ``.data`` of slices whose main weights are in NVMe files, and take a step.

    Returns:
        Full weights, and True if tensors taken from ``.data`` before the assignment have the new values after the step.
    """
    disk = {"device": "nvme", "nvme_path": folder}
    model = make_model()
    inner = torch.optim.SGD(groups_of(model), lr=0.1)
    config = make_config(offload_optimizer=disk, offload_param=disk, aio={"block_size": 64})
    optimizer = zeropp.ZeroOptimizer(inner, model, config)
    slices = [p.parameter for p in optimizer.slices.stepped if p.buffer is not None and not p.buffer.main.in_memory]
    assert slices
    taken = [parameter.data for parameter in slices]
    put(optimizer, [parameter.data * 2 for parameter in tensors(optimizer)])
    with pytest.warns(UserWarning, match="tensors taken from p.data before have the new values"):
        model(batch(0)).square().mean().backward()
    optimizer.step()
    same = all(torch.equal(old, now) for old, now in zip(taken, slices, strict=True))
    return zeropp.full_state(model), same


def test_tensors_taken_before_change_along_where_weights_are_in_files(tmp_path: Path) -> None:
    plain = make_model()
    for parameter in plain.parameters():
        parameter.data = parameter.data * 2
    plain(batch(0)).square().mean().backward()
    torch.optim.SGD(groups_of(plain), lr=0.1).step()
    for state, same in run_ranks(2, replaced_in_files, str(tmp_path)):
        assert worst(state, plain.state_dict()) < 1e-5 and same


def quiet(settings: dict[str, Any]) -> list[int]:
    """Train five steps in which the tensors of the groups are read but not edited.

    Returns:
        Number of exchanges between ranks in each step.
    """
    model, optimizer = make_sharded(settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    comm, counts = optimizer.engine.comm, []
    exchange = comm.all_gather_ints

    def counted(row: list[int]) -> list[list[int]]:
        counts[-1] += 1
        return exchange(row)

    comm.all_gather_ints = counted  # type: ignore[method-assign]
    for step in range(5):
        counts.append(0)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        [float(p.data.abs().max()) + float(p.sum()) for p in tensors(optimizer)]
        with torch.no_grad():
            model(batch(step))
    return counts


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ["stage 2", "stage 3", "offload"])
def test_nothing_is_exchanged_where_nothing_is_edited(name: str) -> None:
    for counts in run_ranks(2, quiet, SETTINGS[name]):
        assert counts[2:] == [0] * 3, counts


def saved_and_loaded(settings: dict[str, Any]) -> bool:
    """Save and load the optimizer's state dict after adding a user's entry to the state of every tensor in the groups.

    Returns:
        True if the state dict lists this rank's slices and none of the groups' markers, and an edit after the load
        changes the output.
    """
    model, optimizer = make_sharded(settings)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    for parameter in tensors(optimizer):
        optimizer.state[parameter]["of the user"] = 1
    state = optimizer.state_dict()
    listed = sum(len(group["params"]) for group in state["param_groups"])
    optimizer.load_state_dict(copy.deepcopy(state))
    edited = apart(model(batch(1)).detach(), 0.0)
    scale(optimizer)
    return listed == len(optimizer.slices.stepped) and edited != apart(model(batch(1)).detach(), 0.0)


@pytest.mark.every(2)
@pytest.mark.parametrize("world", [2, 3])
def test_states_have_slices_alone(world: int) -> None:
    assert all(run_ranks(world, saved_and_loaded, SETTINGS["stage 2"]))


def copied_groups(settings: dict[str, Any]) -> bool:
    _, optimizer = make_sharded(settings)
    groups = optimizer.param_groups
    copies = pickle.loads(pickle.dumps(groups)), copy.deepcopy(groups)
    return all(
        type(its) is nn.Parameter and torch.equal(own, its)
        for copied in copies
        for group, other in zip(groups, copied, strict=True)
        for own, its in zip(group["params"], other["params"], strict=True)
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 2", "offload"])
def test_groups_are_pickled_and_copied_as_plain_tensors(name: str) -> None:
    assert all(run_ranks(2, copied_groups, SETTINGS[name]))


def alone(settings: dict[str, Any]) -> None:
    model, optimizer = make_sharded(settings)
    if dist.get_rank() == 0:
        scale(optimizer)
    model(batch(0)).square().mean().backward()
    optimizer.step()


def test_an_edit_of_whole_groups_on_one_rank_ends_on_every_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, alone, {**SETTINGS["stage 2"], "hang_timeout": 4})
    assert all("edit of weights in optimizer.param_groups" in str(failure) for failure in caught.value.failures)


def edited_and_evaluated(settings: dict[str, Any]) -> list[str]:
    """Edit one weight in the groups, and run forwards without gradients and without a step.

    Returns:
        Warnings that a forward computes with old weights.
    """
    model = make_model()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    with logged() as said, torch.no_grad():
        model(batch(0))
        optimizer.param_groups[0]["params"][0].mul_(0)
        for step in range(2):
            model(batch(step))
    return [text for text in said if "this forward computes with the old weights" in text]


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "warnings"), [("stage 2", 1), ("persistent", 1), ("stage 0", 0), ("stage 3", 0)])
def test_a_forward_that_misses_an_edit_says_so(name: str, warnings: int) -> None:
    for said in run_ranks(2, edited_and_evaluated, SETTINGS[name]):
        assert len(said) == warnings, said
