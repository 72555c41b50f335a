"""Short trainings on the simulated GPU: golden run configurations, offload, and FSDP2 with zeropp's collectives."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import zeropp
from tests.golden.runs import CASES as GOLDEN
from tests.gpu.delays import Block
from tests.streams.card import Card, pretended_card
from tests.streams.seams import Seam, without
from tests.support.parity import Recipe, make_optimizer
from zeropp import fsdp2

__all__ = [
    "BOTH",
    "RUNS",
    "Run",
    "Training",
    "calls_of_a_step",
    "check_reported",
    "edited_in_groups",
    "first_race",
    "offloaded",
    "races",
]

_LOCAL, _STEPS = 2, 3
_PATIENCE = 30.0  # seconds for one training
_BF16: dict[str, object] = {"bf16": {"enabled": True}}


class Model(nn.Sequential):
    """Blocks in a chain, with a second use of the first block."""

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = super().forward(x)
        return first + self[0](x)


class Training:
    """A small model on the simulated GPU, and its optimizer."""

    def __init__(self, card: Card, run: Run, folder: Path, blocks: int = 4) -> None:
        self.card, self.run, self.folder, self.recipe = card, run, folder, run.recipe
        torch.manual_seed(7)
        self.model = Model(*(Block(run.width) for _ in range(blocks))).to(run.recipe.dtype)
        card.take(*self.model.parameters())
        self.model[0].requires_grad_(not run.frozen)
        self.wrap()

    def wrap(self) -> None:
        self.inner = make_optimizer(self.recipe, self.model)
        self.optimizer = zeropp.ZeroOptimizer(self.inner, self.model, _settings(self.run, self.folder))

    def loss(self) -> Tensor:
        x = torch.ones(3, self.run.width)
        self.card.take(x)
        return self.model(x).float().square().mean()

    def backward(self) -> None:
        """Run all backwards of one accumulation window."""
        for micro in range(self.recipe.accumulation):
            holds = self.recipe.how == "no_sync" and micro + 1 < self.recipe.accumulation
            with self.optimizer.no_sync() if holds else contextlib.nullcontext():
                self.optimizer.backward(self.loss())

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        """Run forwards without gradients in training mode, and in eval mode with and without a graph."""
        with torch.no_grad():
            self.loss()
        self.model.eval()
        self.loss()
        with torch.inference_mode():
            self.loss()
        self.model.train()


def stepped_twice(t: Training) -> None:
    """Take a second step while the weights of the first step are still being refreshed."""
    t.backward()
    t.optimizer.step()
    t.optimizer.step()


def abandoned(t: Training) -> None:
    """Run forwards without a backward, and release the units that were prefetched for it."""
    for _ in range(2):
        t.loss()
        t.optimizer.empty_partition_cache()


def failed(t: Training) -> None:
    """Let a backward fail half-way; the next backward starts from the state that it leaves."""

    def fail(*given: object) -> None:
        raise ArithmeticError

    handle = t.model[1].register_full_backward_pre_hook(fail)
    with contextlib.suppress(ArithmeticError):
        t.backward()
    handle.remove()
    t.optimizer.zero_grad(set_to_none=False)


def asked(t: Training) -> None:
    """Read and load weights and optimizer states while a step may still be running."""
    for read in (
        lambda: t.inner.state_dict()["state"],
        lambda: list(t.optimizer.state.values()),
        lambda: t.optimizer.state_dict(),
        lambda: zeropp.full_state(t.model),
        lambda: t.model.state_dict(),
    ):
        t.step()
        for value in tree_leaves(read()):
            if isinstance(value, Tensor):
                value.clone()
    t.step()
    t.model.load_state_dict(zeropp.full_state(t.model))
    t.step()
    t.optimizer.load_state_dict(t.optimizer.state_dict())


def cached_read(t: Training) -> None:
    """Read a persistent weight between passes, when such reads are allowed."""
    t.step()
    t.model[0].norm.weight.clone()


def edited(t: Training) -> None:
    """Edit weights and remove a gradient while a step may still be running, and freeze a block."""
    parameters = list(t.model.parameters())
    t.step()
    with zeropp.zero.GatheredParameters(parameters[:2], modifier_rank=0), torch.no_grad():
        parameters[0].mul_(0.5)
    t.backward()
    t.optimizer.step()
    parameters[0].grad = None
    t.model[0].requires_grad_(False)
    t.optimizer.zero_grad()
    t.step()


def edited_in_groups(t: Training) -> None:
    """Edit slices through the optimizer's parameter groups right after a step."""
    t.step()
    with torch.no_grad():
        for group in t.optimizer.param_groups:
            for part in group["params"]:
                part.mul_(0.5)


def averaged(t: Training) -> None:
    """Replace weights by an average right after a step."""
    average = zeropp.ema(t.model, 0.9)
    t.step()
    average.update()
    with average.applied(), torch.no_grad():
        t.loss()


def unfrozen(t: Training) -> None:
    """Unfreeze a frozen block right after its weights were loaded."""
    t.model.load_state_dict(zeropp.full_state(t.model))
    t.model[0].requires_grad_(True)


def wrapped_again(t: Training) -> None:
    """Wrap the weights again while work of the dropped optimizer is still running on them."""
    t.step()
    del t.inner, t.optimizer
    gc.collect()
    t.wrap()


def compared(t: Training) -> None:
    """Compare cached weights between ranks right after a step has begun to refresh them."""
    t.optimizer.step_sync.cache_checksum.every = 1
    t.backward()
    t.optimizer.step()
    t.optimizer.clip_grad_norm_(1.0)


def measured(t: Training) -> None:
    """Read norms between backward and step; then step on gradients that ``no_sync`` holds."""
    t.backward()
    t.optimizer.clip_grad_norm_(0.1)
    t.optimizer.grad_norms()
    t.optimizer.step()
    t.optimizer.zero_grad()
    with t.optimizer.no_sync():
        t.optimizer.backward(t.loss())
    t.optimizer.step(now=True)
    t.optimizer.zero_grad()


def parked(t: Training) -> None:
    """Offload all states between phases and in the middle of an accumulation window, and reload them."""
    t.step()
    t.optimizer.offload_states()
    t.optimizer.reload_states()
    for non_blocking in (True, False):
        t.optimizer.backward(t.loss())
        t.optimizer.offload_states(non_blocking=non_blocking)
        zeropp.full_state(t.model)
        t.optimizer.reload_states(non_blocking=non_blocking)
        for _ in range(t.recipe.accumulation - 1):
            t.optimizer.backward(t.loss())
        t.optimizer.step()
        t.optimizer.zero_grad()


def beside(t: Training) -> None:
    """Run backwards that go through two engines at once."""
    other = Training(t.card, t.run, t.folder)
    for _ in range(2):
        (t.loss() + other.loss()).backward()
        for each in (t, other):
            each.optimizer.step()
            each.optimizer.zero_grad()
    other.optimizer.close()


@dataclass(frozen=True)
class Run:
    """One training with zeropp's optimizer.

    Attributes:
        recipe: model and configuration.
        ways: functions that run after the training steps.
        width: width of the model.
        world: number of ranks, two per node.
        frozen: True if the first block is frozen.
        closes: True to close the engine at the end; False to only drop it.
    """

    recipe: Recipe
    ways: Sequence[Callable[[Training], None]] = ()
    width: int = 16
    world: int = 4
    frozen: bool = False
    closes: bool = True


def offloaded(
    zero: dict[str, object], accumulation: int = 1, *, extension: dict[str, object] | None = None,
    top: dict[str, object] | None = None, **more: Any,
) -> Run:  # fmt: skip
    """Return a bfloat16 training with offload; ``more`` are fields of :class:`Run`."""
    entries = {"dtype": torch.float32, "clip": 1.0, "top": {**_BF16, **(top or {})}, "extension": extension or {}}
    return Run(Recipe(zero=zero, accumulation=accumulation, **entries), **more)  # type: ignore[arg-type]


_STATES: dict[str, object] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
_WEIGHTS: dict[str, object] = {"offload_param": {"device": "cpu", "pin_memory": True, "buffer_size": 1024}}
BOTH = {**_STATES, **_WEIGHTS}
_HPZ: dict[str, object] = {"zero_hpz_partition_size": 2}
_LOCO: dict[str, object] = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 8}}
_LOSSLESS: dict[str, object] = {"weight_codec": "lossless"}
_PIPELINED = {"pipeline_read": True, "pipeline_write": True}


def _files(**more: object) -> dict[str, object]:
    return {
        "offload_optimizer": {"device": "nvme", "pin_memory": True, **more},
        "offload_param": {"device": "nvme", "pin_memory": True, "buffer_size": 1024, "max_in_cpu": 0},
        "sub_group_size": 1024,
    }


_SMALL_BLOCKS: dict[str, object] = {"aio": {"block_size": 1024}}
RUNS: dict[str, Run | Sharded] = {
    "dropped": Run(GOLDEN["hpZ, bf16"], closes=False),
    **{name: Run(recipe) for name, recipe in GOLDEN.items()},
    "stage 1, sums by the backend": Run(
        replace(GOLDEN["stage 1, accumulated"], extension={"reduce_scatter": "backend"})
    ),
    "stage 1, lossless, one node": Run(
        Recipe(zero={"stage": 1, "overlap_comm": True}, dtype=torch.float32, top=_BF16, extension=_LOSSLESS), world=2
    ),
    "read late": Run(
        replace(GOLDEN["stage 3"], evaluate=False, optimizer="AdamW fused", extension={"static_graph": True})
    ),
    "twice, hpZ": Run(GOLDEN["hpZ, bf16"], [stepped_twice, abandoned]),
    "abandoned": Run(Recipe(zero={"stage3_max_reuse_distance": 0}, dtype=torch.float32), [abandoned]),
    "failed": Run(GOLDEN["stage 3"], [failed]),
    "asked, hpZ": Run(GOLDEN["hpZ, bf16"], [asked]),
    "cached are read": Run(GOLDEN["stage 2, overlapped"], [cached_read]),
    "edited, hpZ": Run(GOLDEN["hpZ, bf16"], [edited]),
    "averaged": Run(GOLDEN["hpZ, bf16"], [averaged]),
    "unfrozen": Run(GOLDEN["hpZ, bf16"], [unfrozen], frozen=True),
    "wrapped again": Run(GOLDEN["hpZ, bf16"], [wrapped_again]),
    "groups, lossless": Run(GOLDEN["hpZ, bf16, lossless"], [edited_in_groups]),
    "compared": Run(GOLDEN["hpZ, bf16, delta4, qgZ"], [compared]),
    "measured": Run(GOLDEN["LoCo, accumulated and deferred"], [measured]),
    "parked": Run(GOLDEN["stage 3, small ones persistent, no_sync"], [parked]),
    "parked, LoCo": Run(GOLDEN["LoCo, accumulated and deferred"], [parked]),
    "MiCS": Run(replace(GOLDEN["MiCS, accumulated"], accumulation=1)),
    "MiCS over nodes": Run(Recipe(zero={"mics_shard_size": 4}, accumulation=2, dtype=torch.float32), world=8),
    "states": offloaded(_STATES, 2),
    "two engines, states": offloaded(_STATES, ways=[beside]),
    "states, stage 1, at once": offloaded({"stage": 1, **_STATES}, 2),
    "states, stage 2": offloaded({"stage": 2, "overlap_comm": True, **_STATES}, ways=[stepped_twice]),
    "states, stage 1, lossless, one node": offloaded({"stage": 1, **_STATES}, extension=_LOSSLESS, world=2),
    "states, stage 1, no comm streams": offloaded({"stage": 1, "overlap_comm": False, **_STATES}),
    "states, a part": offloaded({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "both": offloaded(BOTH, ways=[stepped_twice, abandoned]),
    "both, asked": offloaded(BOTH, ways=[asked]),
    "both, edited": offloaded(BOTH, ways=[edited, edited_in_groups]),
    "both, measured": offloaded(BOTH, ways=[measured]),
    "both, dropped": offloaded(BOTH, closes=False),
    "both, qwZ": offloaded({**BOTH, "zero_quantized_weights": True}),
    "both, hpZ, lossless": offloaded({**BOTH, **_HPZ}, extension=_LOSSLESS),
    "states, hpZ, delta4": offloaded({**_STATES, **_HPZ}, extension={"weight_codec": "delta4"}),
    "states, LoCo, deferred": offloaded({**_STATES, **_LOCO}, 2, extension={"defer_cross_reduction": True}),
    "states, MiCS, accumulated": offloaded({**_STATES, "mics_shard_size": 2}, 2),
    "files": offloaded(_files(), 2, top=_SMALL_BLOCKS, width=64),
    "files, pipelined": offloaded(_files(**_PIPELINED), top=_SMALL_BLOCKS, width=64),
}


@dataclass(frozen=True)
class Sharded:
    """One training with FSDP2 whose collectives are zeropp's.

    Attributes:
        settings: arguments of ``zeropp.fsdp2.apply``.
        reshards: ``reshard_after_forward`` of ``fully_shard``.
        world: number of ranks, two per node.
    """

    settings: dict[str, Any]
    reshards: bool | int = True
    world: int = 4


_WHOLE = {"weights": None, "gradient_bits": None, "vector_bits": None}
RUNS |= {
    "FSDP2": Sharded({}),
    "FSDP2, LoCo": Sharded({"feedback": "both", "hadamard": True}),
    "FSDP2, codes again": Sharded({"secondary": "codes"}, reshards=2),
    "FSDP2, values": Sharded({**_WHOLE, "gather_hops": 1}),
    "FSDP2, values, two hops": Sharded({**_WHOLE, "gather_hops": 2}),
}


@contextlib.contextmanager
def _ranks(world: int) -> Iterator[None]:
    """Create a fake process group of which only rank 0 exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _settings(run: Run, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = run.recipe.config()
    config["zeropp"] = {**config["zeropp"], "local_world_size": _LOCAL, "warm_up": False}
    zero = config["zero_optimization"]
    for block in ("offload_optimizer", "offload_param"):
        if zero.get(block, {}).get("device") == "nvme":
            zero[block] = {**zero[block], "nvme_path": str(folder)}
    return config


def _train_sharded(run: Sharded, card: Card) -> None:
    torch.manual_seed(7)
    model = Model(*(Block(16) for _ in range(4)))
    card.take(*model.parameters())
    mesh = init_device_mesh("cuda", (run.world,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=run.reshards)
    fsdp2.apply(model, local_world_size=_LOCAL, **run.settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(_STEPS):
        for last in (False, True):
            model.set_is_last_backward(last)
            x = torch.ones(3, 16)
            card.take(x)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _train(run: Run, card: Card, folder: Path) -> None:
    training = Training(card, run, folder)
    for _ in range(_STEPS):
        training.step()
        if run.recipe.evaluate:
            training.evaluate()
    zeropp.full_state(training.model)
    for way in run.ways:
        way(training)
    # Take one more step, so that refreshes of its weights are in flight when the engine and its memory are freed.
    training.step()
    assert training.optimizer.skipped_steps == 0, "a skipped step makes none of the accesses to check"
    if run.closes:
        training.optimizer.close()
        for value in tree_leaves(dict(training.inner.state)):
            if isinstance(value, Tensor):
                value.clone()


def races(run: Run | Sharded, folder: Path, *, late: float = 0.0, tell: Callable[[str], object] = str) -> list[str]:
    """Train, and return descriptions of the unordered accesses to memory.

    Args:
        run: the training.
        folder: folder for files.
        late: seconds by which threads delay each piece of work. A thread that does not wait for that work is then
            first.
        tell: called with each description as soon as it is found.
    """
    gc.freeze()
    try:
        with _ranks(run.world), pretended_card(run.world, late=late) as card:
            card.clocks.tell = tell
            _train(run, card, folder) if isinstance(run, Run) else _train_sharded(run, card)
            gc.collect()
    finally:
        gc.unfreeze()
    return list(card.clocks.races)


def calls_of_a_step(run: Run, folder: Path, blocks: int) -> int:
    """Return the number of calls of zeropp's own functions on the main thread, in a step with prepared work."""
    found, where = 0, str(Path(zeropp.__file__).parent)

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(where)

    with _ranks(run.world), pretended_card(run.world) as card:
        training = Training(card, run, folder, blocks)
        for _ in range(8):
            training.step()
        sys.setprofile(count)
        try:
            training.step()
        finally:
            sys.setprofile(None)
        training.optimizer.close()
    return found


def _first(
    found: Connection, run: Run | Sharded, folder: Path, without: contextlib.AbstractContextManager[None], late: float
) -> None:
    def tell(word: str) -> None:
        found.send(word)
        os._exit(0)

    # Hide stderr and logs, because threads may raise errors when a wait is missing.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    logging.disable()
    try:
        with without:
            races(run, folder, late=late, tell=tell)
            tell("")
    except BaseException as error:
        tell(f"error: {error!r}")


def first_race(
    run: Run | Sharded, folder: Path, without: contextlib.AbstractContextManager[None], *, late: float
) -> str:
    """Return the first race of a training ``without`` some waits, or its error, or "".

    The training runs in a child process, because it may crash or hang.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_first, args=(theirs, run, folder, without, late))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(_PATIENCE) else "error: it hangs"  # type: ignore[no-any-return]
    except EOFError:
        return "error: it has crashed"
    finally:
        child.kill()
        child.join()
        ours.close()


def check_reported(gone: Sequence[Seam], run: Run | Sharded, folder: Path, *, loud: str | None = None) -> None:
    """Assert that a training without some waits has a race.

    On a busy machine, a race may show only with long delays, so three delays are tried.

    Args:
        gone: the waits to remove.
        run: a training that needs them.
        folder: folder for files.
        loud: name of an error that counts as a race.
    """
    found: list[str] = []
    for late in (0.003, 0.01, 0.03):
        found.append(first_race(run, folder, without(*gone), late=late))
        if found[-1] and (not found[-1].startswith("error") or (loud is not None and loud in found[-1])):
            return
    raise AssertionError(f"without {[seam.text for seam in gone]} there is no race; found {found}")
