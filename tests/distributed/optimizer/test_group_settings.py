"""Settings of parameter groups that differ between ranks: every rank raises before any weight changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks
from zeropp.optimizer import optimizer_step
from zeropp.optimizer.optimizer_step import fold

Group = dict[str, Any]


def on_rank_1(change: Callable[[Group], None]) -> Callable[[Group], None]:
    def only_there(group: Group) -> None:
        if dist.get_rank() == 1:
            change(group)

    return only_there


CHANGES: dict[str, tuple[Callable[[Group], None], str]] = {
    "lr": (on_rank_1(lambda g: g.update(lr=0.05)), r"group 1 lr is 0\.1 on ranks \[0\], 0\.05 on ranks \[1\]"),
    "lr, a little": (on_rank_1(lambda g: g.update(lr=0.1 + 1e-7)), "group 1 lr is"),
    "betas": (on_rank_1(lambda g: g.update(betas=(0.9, 0.95))), r"group 1 betas\[1\] is 0\.999 .*0\.95"),
    "betas in a list": (
        lambda g: g.update(betas=[0.9, 0.999 - dist.get_rank() / 100]),
        r"group 1 betas\[1\] is 0\.999 .*0\.989",
    ),
    "a flag": (on_rank_1(lambda g: g.update(amsgrad=True)), "group 1 amsgrad is False on ranks"),
    "a key": (on_rank_1(lambda g: g.update(warmup=3)), r"group 1 warmup is None on ranks \[0\], 3"),
    "a tensor": (lambda g: g.update(lr=torch.tensor(0.1 + dist.get_rank())), "group 1 lr is 0.1.* 1.1"),
    "a tensor beside a number": (on_rank_1(lambda g: g.update(lr=torch.tensor(0.5))), "group 1 lr is 0.1 .*0.5"),
    "NaN": (on_rank_1(lambda g: g.update(lr=float("nan"))), "group 1 lr is 0.1 .*nan on ranks"),
}
SAME: dict[str, Callable[[Group], None]] = {
    "a name for each rank": lambda g: g.update(name=f"rank {dist.get_rank()}", owner=object()),
    "the last bit": on_rank_1(lambda g: g.update(lr=0.1 * (1 + 2**-52))),
    "NaN everywhere": lambda g: g.update(unused=float("nan")),
    "a list and a tuple": on_rank_1(lambda g: g.update(betas=list(g["betas"]))),
    "tensors": lambda g: g.update(lr=torch.tensor(0.25)),
}


def stepped(change: Callable[[Group], None], first: str = "") -> tuple[str, bool, bool]:
    """Change the second group's settings after a backward, and step.

    Args:
        change: function that edits the group.
        first: call between the backward and the change: "clip", "norms", or "" for none.

    Returns:
        The error ("" for none), True if a weight moved, and True if training goes on with equal settings afterwards.
    """
    model = Routed()
    groups = [{"params": model.blocks[0].parameters()}, {"params": model.blocks[1:].parameters()}]
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(groups, lr=0.1), model, make_config(hang_timeout=5))
    model(torch.ones(2, 8)).square().mean().backward()
    before = zeropp.full_state(model)
    given = dict(optimizer.param_groups[1])
    if first == "clip":
        optimizer.clip_grad_norm_(1e9)
    elif first == "norms":
        optimizer.grad_norms()
    change(optimizer.param_groups[1])
    message = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
    moved = not all(torch.equal(value, before[name]) for name, value in zeropp.full_state(model).items())
    optimizer.param_groups[1].pop("warmup", None)
    optimizer.param_groups[1].update(given)
    optimizer.step()
    after = zeropp.full_state(model)
    return message, moved, not any(torch.equal(after[name], value) for name, value in before.items())


def changed(name: str) -> tuple[str, bool, bool]:
    return stepped(CHANGES[name][0])


def changed_late(first: str) -> tuple[str, bool, bool]:
    return stepped(CHANGES["lr"][0], first)


@pytest.mark.every(2)
@pytest.mark.parametrize("first", ["clip", "norms"])
def test_settings_that_differ_after_gradients_were_looked_at(first: str) -> None:
    """A warm-up may set the rate right before ``step()``, after gradients were clipped or measured."""
    for message, moved, trains in run_ranks(2, changed_late, first):
        assert re.search(CHANGES["lr"][1], message), message
        assert not moved and trains


def left_alike(name: str) -> tuple[str, bool, bool]:
    return stepped(SAME[name])


@pytest.mark.every(12)
@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_differ(name: str) -> None:
    for message, moved, trains in run_ranks(2, changed, name):
        assert re.search(CHANGES[name][1], message) and "averaged over the ranks" in message, message
        assert not moved and trains


@pytest.mark.every(4)
@pytest.mark.parametrize("name", SAME)
def test_settings_that_are_the_same(name: str) -> None:
    for message, moved, _ in run_ranks(2, left_alike, name):
        assert message == "" and moved


def plateau() -> tuple[int, str]:
    """Train with a scheduler that each rank feeds with its own loss.

    Returns:
        Number of steps taken, and the error after them.
    """
    model = nn.Linear(4, 4)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(hang_timeout=5))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).square().sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
        scheduler.step(float(step if dist.get_rank() else -step))
    return 4, ""


@pytest.mark.campaign
def test_a_plateau_on_one_rank() -> None:
    for step, message in run_ranks(2, plateau):
        assert step == 2 and "group 0 lr is" in message


def stepped_as_on_a_card(name: str) -> tuple[str, bool, bool]:
    """Run a case while the host does not read settings that are tensors, as with tensors on a GPU."""
    plain = optimizer_step._numbers_in

    def numbers_in(name: str, value: object) -> Iterator[tuple[str, Any]]:
        return iter([(name, value)]) if isinstance(value, torch.Tensor) else plain(name, value)

    optimizer_step._numbers_in = numbers_in
    try:
        return stepped(CHANGES[name][0] if name in CHANGES else SAME[name])
    finally:
        optimizer_step._numbers_in = plain


def test_tensors_that_the_host_does_not_read() -> None:
    for message, moved, trained in run_ranks(2, stepped_as_on_a_card, "a tensor"):
        assert re.search("group 1 lr is 0.1.* 1.1", message) and not moved and trained, message
    for message, moved, _ in run_ranks(2, stepped_as_on_a_card, "tensors"):
        assert not message and moved


def test_hashes_of_tensors() -> None:
    """The hash of tensor settings is computed on the device, so that the host does not wait for their values."""
    one, other = torch.tensor(0.1), torch.tensor([0.9, 0.999])
    code = fold(7, [one, other])
    assert code.shape == () and code.dtype == torch.int64 and 0 <= int(code) < 2**24
    assert int(code) == int(fold(7, [one.clone(), other.clone()]))
    near = one.nextafter(other[0])
    different = [fold(8, [one, other]), fold(7, [other, one]), fold(7, [one]), fold(7, [near, other])]
    assert len({int(code), *map(int, different)}) == 5
