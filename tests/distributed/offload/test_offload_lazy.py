"""Lazy steps on the host: waits for one unit's step, waits for the whole step, and errors of steps.

The tests block steps by events that other threads set. Every wait has a limit, so a defect shows as a wrong list
instead of a hang.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

import zeropp
from tests.support.branching_models import Routed, chain, make_config
from tests.support.offload_pairs import delayed, host_apart, states_of
from tests.support.rank_pool import run_ranks
from tests.support.small_models import MODELS
from zeropp.comm import threads
from zeropp.offload import swap
from zeropp.offload.swap import SwapError
from zeropp.optimizer import host_step
from zeropp.optimizer.host_step import HostStep

LIMIT = 15.0  # seconds after which a blocked step runs without a release; less than hang_timeout
A_WHILE = 0.05  # seconds before a release, in which code that wrongly does not wait would run on
ORDER = (2, 0, 1, 3)  # order in which forward uses the blocks; not the order of definition
NAMES = [f"blocks.{index}" for index in ORDER]
WIDTH = 32
Saved = dict[str, Any]


def place(where: str, folder: str) -> tuple[dict[str, Any], bool]:
    """Return the settings of a placement, and True if host memory is separate from the device's memory."""
    base = where.removesuffix(" apart")
    small, cpu = {"aio": {"block_size": 1024}}, {"offload_optimizer": {"device": "cpu"}}
    disk = {"device": "nvme", "nvme_path": folder}
    settings: dict[str, dict[str, Any]] = {
        "no offload": {},
        "cpu": cpu,
        "stage 2": {**cpu, "stage": 2},
        "nvme": {**small, "offload_optimizer": disk},
        "all on nvme": {
            **small, "sub_group_size": 1024, "offload_optimizer": {**disk, "buffer_count": 1},
            "offload_param": {**disk, "max_in_cpu": 0, "buffer_count": 2},
        },
    }  # fmt: skip
    return settings[base], base != where


def backward(model: Routed, optimizer: zeropp.ZeroOptimizer, number: int, order: tuple[int, ...] = ORDER) -> Tensor:
    """Run forward and backward of micro-batch ``number``, and return the detached output."""
    output: Tensor = model(batch(number), chain(*order))
    optimizer.backward(output.square().mean())
    return output.detach()


def batch(number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(31 * number + dist.get_rank()))


@contextlib.contextmanager
def training(
    where: str, folder: str, order: tuple[int, ...] = ORDER, **more: object
) -> Iterator[tuple[Routed, zeropp.ZeroOptimizer]]:
    """Yield a model and its optimizer after two steps, in which the order is learned, and a third backward."""
    settings, apart = place(where, folder)
    with host_apart(apart):
        torch.manual_seed(3)
        model = Routed(len(ORDER), WIDTH)
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        config = make_config(gradient_clipping=0.3, hang_timeout=60, **settings, **more)
        optimizer = zeropp.ZeroOptimizer(inner, model, config)
        for number in range(2):
            backward(model, optimizer, number, order)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, optimizer, 2, order)
        yield model, optimizer
        optimizer.close()


def with_and_without(run: Callable[..., Any], where: str, folder: str, *arguments: object) -> tuple[Any, Any]:
    """Return the result of ``run`` with offload, and its result without offload."""
    return run(where, folder, *arguments), run("no offload", "", *arguments)


def pending(optimizer: zeropp.ZeroOptimizer) -> list[str]:
    """Return the names of units whose step has not been waited for."""
    return [unit.name for unit in optimizer.engine.units if unit.stepping is not None]


def slices(optimizer: zeropp.ZeroOptimizer) -> list[Tensor]:
    """Return copies of this rank's slices of the weights."""
    return [parameter.detach().clone() for group in optimizer.inner.param_groups for parameter in group["params"]]


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) > 0 and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class Held:
    """Steps that are blocked unit by unit. Each runs when it is released, or after ``LIMIT`` seconds.

    Attributes:
        done: names of units that have been stepped, in order.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self._gates = {name: threading.Event() for name in NAMES}

    def let_go(self, *names: str) -> None:
        """Release the steps of the named units, or of all units if no name is given."""
        for name in names or NAMES:
            self._gates[name].set()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Block steps that are queued in this context, and release the remaining ones at its end."""
        plain = HostStep._step

        def held(own: HostStep, rule: Any, jobs: Any, *more: Any) -> None:
            name = jobs[0].buffer.unit
            if not self._gates[name].wait(LIMIT):
                # Release all other steps, too. Otherwise each of them would wait for the limit.
                self.let_go()
            plain(own, rule, jobs, *more)
            self.done.append(name)

        try:
            with mock.patch.object(HostStep, "_step", held):
                yield
        finally:
            self.let_go()

    @contextlib.contextmanager
    def let_go_late(self) -> Iterator[None]:
        """Release all steps after ``A_WHILE`` seconds, or when the context ends."""
        ended = threading.Event()

        def later() -> None:
            ended.wait(A_WHILE)
            self.let_go()

        with beside(later):
            try:
                yield
            finally:
                ended.set()


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Run ``work`` on another thread during this context."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(LIMIT * len(NAMES))


def one_by_one(where: str, folder: str, order: tuple[int, ...]) -> tuple[dict[str, list[str]], list[Tensor]]:
    """Step lazily, and release the units' steps one by one during the next forward.

    Returns:
        By event (``step()`` has returned, a block's forward has run): the names of units stepped by then. Also the
        output of the forward and the final weights.
    """
    steps, found, ran = Held(), dict[str, list[str]](), {f"blocks.{index}": threading.Event() for index in order}

    def note(name: str) -> None:
        found[name] = list(steps.done)
        ran[name].set()

    def follow() -> None:
        for name in ran:
            # Leave the block time to run. If it does not wait for its step, it runs now, too early.
            ran[name].wait(A_WHILE)
            steps.let_go(name)
            ran[name].wait(LIMIT)

    with training(where, folder, order) as (model, optimizer):
        for index, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, name=f"blocks.{index}": note(name))
        with steps.inside():
            optimizer.step()
            found["step()"] = list(steps.done)
            # The edit affects the next step only, because the pending step has a copy of its settings.
            optimizer.param_groups[0]["lr"] *= 2
            optimizer.zero_grad()
            with beside(follow):
                output = backward(model, optimizer, 3, order)
        optimizer.step()
        return found, [output, *zeropp.full_state(model).values()]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("where", "world"), [("all on nvme apart", 2), ("cpu", 2), ("stage 2 apart", 2), ("stage 2", 1), ("cpu", 1)]
)
def test_each_unit_waits_for_its_own_step(where: str, world: int, tmp_path: Path) -> None:
    """``step()`` returns before any unit is stepped; each unit's forward runs while later units' steps are blocked."""
    # A forward in stage 2 gathers nothing, so no order is learned, and units are stepped in the model's order.
    order = tuple(sorted(ORDER)) if "stage 2" in where else ORDER
    names = [f"blocks.{index}" for index in order]
    results = run_ranks(world, with_and_without, one_by_one, where, str(tmp_path), order, timeout=120)
    for (found, numbers), (_, expected) in results:
        assert found == {"step()": [], **{name: names[: place + 1] for place, name in enumerate(names)}}
        assert equal(numbers, expected)


def around_a_backward(where: str, folder: str) -> tuple[list[str], list[str], list[Tensor]]:
    """Run a backward that does not use the last unit, while that unit's step is blocked.

    Returns:
        Names of units stepped before and after the backward, and the whole weights after a further step.
    """
    steps = Held()
    with training(where, folder) as (model, optimizer):
        with steps.inside():
            optimizer.step()
            optimizer.zero_grad()
            steps.let_go(*NAMES[:-1])
            # This pass uses the first block only, so it does not use the last unit.
            loss = model.blocks[ORDER[0]](batch(3)).square().mean()
            before = list(steps.done)
            with steps.let_go_late():
                loss.backward()
                after = list(steps.done)
        optimizer.step()
        return before, after, list(zeropp.full_state(model).values())


@pytest.mark.every(2)
@pytest.mark.parametrize(("where", "world"), [("cpu", 2), ("cpu", 1), ("nvme apart", 2), ("stage 2 apart", 2)])
def test_a_backward_waits_for_the_whole_step(where: str, world: int, tmp_path: Path) -> None:
    """A backward overwrites gradients that the step reads, so it waits for all units, also for unused ones."""
    results = run_ranks(world, with_and_without, around_a_backward, where, str(tmp_path), timeout=120)
    for (before, after, weights), (_, _, expected) in results:
        assert NAMES[0] in before and NAMES[-1] not in before and sorted(after) == sorted(NAMES)
        assert equal(weights, expected)


def at_its_end(where: str, folder: str) -> list[str]:
    """Return the units that have been stepped when ``step()`` returns, with ``lazy_step`` false."""
    steps = Held()
    with training(where, folder, lazy_step=False) as (_, optimizer), steps.inside(), steps.let_go_late():
        optimizer.step()
        return list(steps.done)


@pytest.mark.every(2)
@pytest.mark.parametrize(("where", "world"), [("nvme apart", 2), ("cpu", 1)])
def test_a_step_that_is_not_lazy_ends_with_the_last_unit(where: str, world: int, tmp_path: Path) -> None:
    assert run_ranks(world, at_its_end, where, str(tmp_path), timeout=120) == [NAMES] * world


def in_a_hook(where: str, folder: str, by: str) -> tuple[list[str], list[str], list[str], list[Tensor]]:
    """Take one step with a step post-hook and one without.

    Returns:
        Units stepped and units pending when the hook runs, units stepped when the step without a hook returns, and the
        weights that the hook reads.
    """
    steps, free = Held(), Held()
    with training(where, folder) as (model, optimizer):
        seen: list[Any] = []
        handle = (optimizer if by == "the wrapper" else optimizer.inner).register_step_post_hook(
            lambda *_: seen.append((list(steps.done), pending(optimizer), slices(optimizer)))
        )
        with steps.inside(), steps.let_go_late():
            optimizer.step()
        handle.remove()
        backward(model, optimizer, 3)
        with free.inside():
            optimizer.step()
            without = list(free.done)
    ((done, left, weights),) = seen
    return done, left, without, weights


@pytest.mark.every(2)
@pytest.mark.parametrize(("where", "by"), [("cpu apart", "the wrapper"), ("nvme apart", "the wrapped optimizer")])
def test_a_hook_after_a_step_finds_all_of_it_done(where: str, by: str, tmp_path: Path) -> None:
    results = run_ranks(2, with_and_without, in_a_hook, where, str(tmp_path), by, timeout=120)
    for (done, left, without, weights), (*_, expected) in results:
        assert (done, left, without) == (NAMES, [], [])
        assert equal(weights, expected)


def gather(model: Routed, optimizer: zeropp.ZeroOptimizer, saved: Saved) -> list[Tensor]:
    with zeropp.zero.GatheredParameters(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def close(model: Routed, optimizer: zeropp.ZeroOptimizer, saved: Saved) -> list[Tensor]:
    optimizer.close()
    # Slices may be read after close().
    return slices(optimizer)


WAITING: dict[str, Callable[[Routed, zeropp.ZeroOptimizer, Saved], object]] = {
    "optimizer.state": lambda model, optimizer, saved: list(optimizer.state.values()),
    "state_dict()": lambda model, optimizer, saved: optimizer.state_dict(),
    "inner.state_dict()": lambda model, optimizer, saved: optimizer.inner.state_dict(),
    "model.state_dict()": lambda model, optimizer, saved: model.state_dict(),
    "full_state": lambda model, optimizer, saved: zeropp.full_state(model),
    "GatheredParameters": gather,
    "grad_norms()": lambda model, optimizer, saved: [torch.tensor(norm) for norm in optimizer.grad_norms().values()],
    "clip_grad_norm_()": lambda model, optimizer, saved: optimizer.clip_grad_norm_(0.1),
    "load_state_dict()": lambda model, optimizer, saved: optimizer.load_state_dict(saved),
    "inner.load_state_dict()": lambda model, optimizer, saved: optimizer.inner.load_state_dict(saved),
    # The second step's norm is that of gradients which the first step has clipped.
    "step()": lambda model, optimizer, saved: (optimizer.step(), torch.tensor(optimizer.grad_norm)),
    # close() comes last, because no other call works after it.
    "close()": close,
}


def ask(where: str, folder: str) -> dict[str, tuple[list[str], list[str], list[Tensor]]]:
    """Make each call of WAITING right after a step that is blocked.

    Returns:
        By call: names of units stepped and of units pending when the call returns, and the tensors that the call
        returns, followed by weights and states.
    """
    found: dict[str, tuple[list[str], list[str], list[Tensor]]] = {}
    with training(where, folder) as (model, optimizer):
        for number, (name, call) in enumerate(WAITING.items()):
            steps, saved = Held(), copy.deepcopy(optimizer.state_dict())
            with steps.inside(), steps.let_go_late():
                optimizer.step()
                told = tree_leaves(call(model, optimizer, saved))
                done, left = list(steps.done), pending(optimizer)
            if call is not close:
                told += [*zeropp.full_state(model).values(), *tree_leaves(list(optimizer.state.values()))]
                optimizer.zero_grad()
                backward(model, optimizer, 3 + number)
            found[name] = done, left, [value.clone() for value in told if isinstance(value, Tensor)]
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize(("where", "world"), [("nvme apart", 2), ("cpu", 1)])
def test_calls_outside_a_forward_wait_for_the_whole_step(where: str, world: int, tmp_path: Path) -> None:
    """Calls that read or replace weights, states or gradients outside a forward wait for the whole step.

    Values that such a call loads are not overwritten by the step.
    """
    for found, plain in run_ranks(world, with_and_without, ask, where, str(tmp_path), timeout=120):
        for name, (done, left, numbers) in found.items():
            # "step()" queues a second step. The call waits for the first step only.
            assert done[: len(NAMES)] == NAMES and (left == [] or name == "step()"), (name, done, left)
            assert equal(numbers, plain[name][2]), f"after {name}"


def on_my_cores(cores: list[set[int]]) -> list[int]:
    """Return the numbers of ranks on the same cores that were passed to ``spare_cores``."""
    affinity = mock.patch.object(os, "sched_getaffinity", lambda _: cores[dist.get_rank()])
    with affinity, mock.patch.object(host_step, "spare_cores", return_value=1) as spare, training("cpu", ""):
        return [ranks for (ranks,), _ in spare.call_args_list]


@pytest.mark.parametrize(
    ("cores", "local", "expected"),
    [
        ([{0, 1}, {1, 0}], 2, [2, 2]),
        ([{0, 1}, {2, 3}], 2, [1, 1]),
        # Cores of another node have the same numbers, but are different cores.
        ([{0, 1}, {0, 1}, {0, 1}, {2, 3}], 2, [2, 2, 1, 1]),
    ],
    ids=["shared", "each its own", "two nodes"],
)
def test_ranks_of_a_node_share_its_cores(cores: list[set[int]], local: int, expected: list[int]) -> None:
    assert run_ranks(len(cores), on_my_cores, cores, local_world_size=local) == [[count] for count in expected]


def in_double(where: str, folder: str) -> tuple[list[float], list[Tensor], dict[str, int]]:
    """Train a float64 model for four steps and repeat the third one.

    Returns:
        Loss and norm of each step, states with whole weights, and counts of delayed reads, writes and steps.
    """
    kind, (settings, apart), told = MODELS["gpt"], place(where, folder), list[float]()
    with delayed(dist.get_rank()) as seen, host_apart(apart):
        torch.manual_seed(3)
        model = kind.build().double()
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_clipping=0.3))
        for number in range(4):
            loss = kind.loss(model, kind.batch(torch.Generator().manual_seed(31 * number + dist.get_rank())))
            optimizer.backward(loss)
            # Repeat the third step with the same gradients, right after a step that reads them.
            for _ in range(1 + (number == 2)):
                optimizer.step()
                told += [loss.item(), optimizer.grad_norm or 0.0]
            optimizer.zero_grad()
        numbers = [*tree_leaves(states_of(optimizer)), *zeropp.full_state(model).values()]
        optimizer.close()
    return told, numbers, seen


@pytest.mark.every(2)
@pytest.mark.parametrize(("world", "where"), [(2, "all on nvme apart"), (1, "all on nvme")])
def test_float64_in_files_is_clipped(world: int, where: str, tmp_path: Path) -> None:
    """A float32 divisor is too imprecise for float64 gradients, so they are scaled in place through the mapping."""
    for (told, numbers, seen), plain in run_ranks(world, with_and_without, in_double, where, str(tmp_path)):
        # told[7] is the norm of the repeated step, whose gradients the step before has clipped to 0.3.
        assert told == plain[0] and told[7] == pytest.approx(0.3, rel=1e-4) and seen["step"] > 0 and seen["read"] > 0
        assert equal(numbers, plain[1]) and numbers[-1].dtype == torch.float64


def refused(where: str, folder: str, which: str, short: bool, use: str) -> tuple[str, BaseException | None]:
    """Return the error of a use right after a step in which the last rank's disk fails, and the error's cause."""
    failure: dict[str, Any] = {"return_value": 0} if short else {"side_effect": OSError(errno.EIO, "of the test")}
    bad = mock.patch.object(swap, which, **failure) if dist.get_rank() == dist.get_world_size() - 1 else None
    # close() need not wait long: the comm stream of a good rank hangs in a collective that the failed rank never joins.
    with mock.patch.object(threads, "_CLOSING", 0.1), training(where, folder) as (model, optimizer):
        with bad or contextlib.nullcontext():
            optimizer.step()
            with pytest.raises(RuntimeError) as caught:
                optimizer.state_dict() if use == "states" else backward(model, optimizer, 3)
        return str(caught.value), caught.value.__cause__


@pytest.mark.parametrize(
    ("world", "where", "which", "short", "use"),
    [
        (1, "nvme", "read_at", True, "a forward"),
        (1, "nvme apart", "write_at", False, "states"),
        (2, "all on nvme apart", "read_at", False, "a forward"),
    ],
)
def test_a_disk_s_error_is_the_cause(world: int, where: str, which: str, short: bool, use: str, tmp_path: Path) -> None:
    """On the rank with the failing disk, SwapError is the cause of the raised error. Other ranks get its text only."""
    found = run_ranks(world, refused, where, str(tmp_path), which, short, use)
    words, cause = f"cannot {which.removesuffix('_at')}", found[-1][1]
    assert all(f"rank {world - 1} failed" in said and words in said and "at byte" in said for said, _ in found), found
    assert isinstance(cause, SwapError) and (cause.errno, found[0][1]) == (errno.EIO, None if world > 1 else cause)
    assert str(cause.filename).startswith(str(tmp_path)) and words in str(cause) and "at byte" in str(cause)
