"""Steps on the host that have not ended: what waits for one unit's, what waits for all, and what comes of their errors.

Steps are held by events, which other threads set. Every wait has a limit, so that what is broken shows as a wrong list.
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

LIMIT = 15.0  # seconds after which what is held goes on by itself; less than hang_timeout
A_WHILE = 0.05  # seconds in which what has to wait is given the chance not to
ORDER = (2, 0, 1, 3)  # in which blocks are used; not that in which they are defined
NAMES = [f"blocks.{index}" for index in ORDER]
WIDTH = 32
Saved = dict[str, Any]


def place(where: str, folder: str) -> tuple[dict[str, Any], bool]:
    """Settings, and whether the host's memory is another than the device's."""
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
    """The model's output, whose backward has been."""
    output: Tensor = model(batch(number), chain(*order))
    optimizer.backward(output.square().mean())
    return output.detach()


def batch(number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(31 * number + dist.get_rank()))


@contextlib.contextmanager
def training(
    where: str, folder: str, order: tuple[int, ...] = ORDER, **more: object
) -> Iterator[tuple[Routed, zeropp.ZeroOptimizer]]:
    """A model and its optimizer after two steps, by which the order is known, and a third backward."""
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
    """What comes of a training with offload, and of the same without."""
    return run(where, folder, *arguments), run("no offload", "", *arguments)


def pending(optimizer: zeropp.ZeroOptimizer) -> list[str]:
    """Units whose steps nobody has waited for."""
    return [unit.name for unit in optimizer.engine.units if unit.stepping is not None]


def slices(optimizer: zeropp.ZeroOptimizer) -> list[Tensor]:
    """Copies of this rank's weights."""
    return [parameter.detach().clone() for group in optimizer.inner.param_groups for parameter in group["params"]]


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) > 0 and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class Held:
    """Steps of units, each of which begins when it is let go, and none later than after ``LIMIT`` seconds.

    Attributes:
        done: units that have been stepped, in order.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self._gates = {name: threading.Event() for name in NAMES}

    def let_go(self, *names: str) -> None:
        """Let these units be stepped, or all of them."""
        for name in names or NAMES:
            self._gates[name].set()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Steps that are queued inside are held; those that still are at the end go on."""
        plain = HostStep._step

        def held(own: HostStep, rule: Any, jobs: Any) -> None:
            name = jobs[0].buffer.unit
            if not self._gates[name].wait(LIMIT):
                # Nobody is going to let the others go, either.
                self.let_go()
            plain(own, rule, jobs)
            self.done.append(name)

        try:
            with mock.patch.object(HostStep, "_step", held):
                yield
        finally:
            self.let_go()

    @contextlib.contextmanager
    def let_go_late(self) -> Iterator[None]:
        """Steps go on once what is inside has had a while to end without them."""
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
    """Do something on another thread meanwhile."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(LIMIT * len(NAMES))


def one_by_one(where: str, folder: str, order: tuple[int, ...]) -> tuple[dict[str, list[str]], list[Tensor]]:
    """Units that were stepped when ``step()`` returned, and when each block of the next forward had run; numbers."""
    steps, found, ran = Held(), dict[str, list[str]](), {f"blocks.{index}": threading.Event() for index in order}

    def note(name: str) -> None:
        found[name] = list(steps.done)
        ran[name].set()

    def follow() -> None:
        for name in ran:
            # Its forward has the time to show that it does not wait.
            ran[name].wait(A_WHILE)
            steps.let_go(name)
            ran[name].wait(LIMIT)

    with training(where, folder, order) as (model, optimizer):
        for index, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, name=f"blocks.{index}": note(name))
        with steps.inside():
            optimizer.step()
            found["step()"] = list(steps.done)
            # The next step's: this one has its own.
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
    """``step()`` has stepped nothing when it returns, and each unit runs while those wanted after it are held."""
    # Forwards of stage 2 gather nothing, so that no order is learned: steps are in that of the model.
    order = tuple(sorted(ORDER)) if "stage 2" in where else ORDER
    names = [f"blocks.{index}" for index in order]
    results = run_ranks(world, with_and_without, one_by_one, where, str(tmp_path), order, timeout=120)
    for (found, numbers), (_, expected) in results:
        assert found == {"step()": [], **{name: names[: place + 1] for place, name in enumerate(names)}}
        assert equal(numbers, expected)


def around_a_backward(where: str, folder: str) -> tuple[list[str], list[str], list[Tensor]]:
    """Units stepped before and after the backward of one unit, while another's step is held; and weights."""
    steps = Held()
    with training(where, folder) as (model, optimizer):
        with steps.inside():
            optimizer.step()
            optimizer.zero_grad()
            steps.let_go(*NAMES[:-1])
            # A pass of its own, that has no use for the last unit.
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
    """Its gradients take the place of those that are being stepped with, also of units that it does not come to."""
    results = run_ranks(world, with_and_without, around_a_backward, where, str(tmp_path), timeout=120)
    for (before, after, weights), (_, _, expected) in results:
        assert NAMES[0] in before and NAMES[-1] not in before and sorted(after) == sorted(NAMES)
        assert equal(weights, expected)


def at_its_end(where: str, folder: str) -> list[str]:
    """Units stepped when ``step()`` returns, if it is not lazy."""
    steps = Held()
    with training(where, folder, lazy_step=False) as (_, optimizer), steps.inside(), steps.let_go_late():
        optimizer.step()
        return list(steps.done)


@pytest.mark.every(2)
@pytest.mark.parametrize(("where", "world"), [("nvme apart", 2), ("cpu", 1)])
def test_a_step_that_is_not_lazy_ends_with_the_last_unit(where: str, world: int, tmp_path: Path) -> None:
    assert run_ranks(world, at_its_end, where, str(tmp_path), timeout=120) == [NAMES] * world


def in_a_hook(where: str, folder: str, by: str) -> tuple[list[str], list[str], list[str], list[Tensor]]:
    """Units stepped and pending where a hook runs after a step, and stepped after one without; weights in the hook."""
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
    # They may be read afterwards.
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
    # With the norm of gradients that the first step has clipped.
    "step()": lambda model, optimizer, saved: (optimizer.step(), torch.tensor(optimizer.grad_norm)),
    # It is the last.
    "close()": close,
}


def ask(where: str, folder: str) -> dict[str, tuple[list[str], list[str], list[Tensor]]]:
    """For each call right after a step that is held: units stepped and pending when it returns, and all numbers."""
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
def test_what_waits_for_the_whole_step(where: str, world: int, tmp_path: Path) -> None:
    """Whatever reads or replaces weights, states or gradients outside of a forward; what is loaded then stays."""
    for found, plain in run_ranks(world, with_and_without, ask, where, str(tmp_path), timeout=120):
        for name, (done, left, numbers) in found.items():
            # Of two steps only the first is waited for.
            assert done[: len(NAMES)] == NAMES and (left == [] or name == "step()"), (name, done, left)
            assert equal(numbers, plain[name][2]), f"after {name}"


def on_my_cores(cores: list[set[int]]) -> list[int]:
    """For how many ranks on the same cores threads were made."""
    affinity = mock.patch.object(os, "sched_getaffinity", lambda _: cores[dist.get_rank()])
    with affinity, mock.patch.object(host_step, "spare_cores", return_value=1) as spare, training("cpu", ""):
        return [ranks for (ranks,), _ in spare.call_args_list]


@pytest.mark.parametrize(
    ("cores", "local", "expected"),
    [
        ([{0, 1}, {1, 0}], 2, [2, 2]),
        ([{0, 1}, {2, 3}], 2, [1, 1]),
        # Cores of another node have the same numbers, and are others.
        ([{0, 1}, {0, 1}, {0, 1}, {2, 3}], 2, [2, 2, 1, 1]),
    ],
    ids=["shared", "each its own", "two nodes"],
)
def test_ranks_of_a_node_share_its_cores(cores: list[set[int]], local: int, expected: list[int]) -> None:
    assert run_ranks(len(cores), on_my_cores, cores, local_world_size=local) == [[count] for count in expected]


def in_double(where: str, folder: str) -> tuple[list[float], list[Tensor], dict[str, int]]:
    """Losses and norms of four steps of float64, one of them taken twice; states and weights; what was delayed."""
    kind, (settings, apart), told = MODELS["gpt"], place(where, folder), list[float]()
    with delayed(dist.get_rank()) as seen, host_apart(apart):
        torch.manual_seed(3)
        model = kind.build().double()
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_clipping=0.3))
        for number in range(4):
            loss = kind.loss(model, kind.batch(torch.Generator().manual_seed(31 * number + dist.get_rank())))
            optimizer.backward(loss)
            # Once more, right after a step that reads them.
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
    """A divisor of float32 would be too little for it, so that gradients are scaled through the mapping."""
    for (told, numbers, seen), plain in run_ranks(world, with_and_without, in_double, where, str(tmp_path)):
        # The norm of what was clipped by the step before.
        assert told == plain[0] and told[7] == pytest.approx(0.3, rel=1e-4) and seen["step"] > 0 and seen["read"] > 0
        assert equal(numbers, plain[1]) and numbers[-1].dtype == torch.float64


def refused(where: str, folder: str, which: str, short: bool, use: str) -> tuple[str, BaseException | None]:
    """What a use right after a step raises where the last rank's disk has failed in it, and the cause of that."""
    failure: dict[str, Any] = {"return_value": 0} if short else {"side_effect": OSError(errno.EIO, "of the test")}
    bad = mock.patch.object(swap, which, **failure) if dist.get_rank() == dist.get_world_size() - 1 else None
    # A comm stream of another rank stands still in a collective, which need not be waited for at the end.
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
    """On the rank whose disk it is. The others have its words."""
    found = run_ranks(world, refused, where, str(tmp_path), which, short, use)
    words, cause = f"cannot {which.removesuffix('_at')}", found[-1][1]
    assert all(f"rank {world - 1} failed" in said and words in said and "at byte" in said for said, _ in found), found
    assert isinstance(cause, SwapError) and (cause.errno, found[0][1]) == (errno.EIO, None if world > 1 else cause)
    assert str(cause.filename).startswith(str(tmp_path)) and words in str(cause) and "at byte" in str(cause)
