"""Counts of gathers, reductions and disk reads of ``zeropp.accumulate``.

Each unit is gathered once per pass and reduced once per step, for any number of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zeropp
from tests.support.accumulate_stages import STAGES, pairs, scored
from tests.support.branching_models import logged, make_config, worst
from tests.support.offload_pairs import host_apart
from tests.support.parity import Recipe, build, make_optimizer
from tests.support.rank_pool import run_ranks
from zeropp.params.unit import UnitState
from zeropp.params.wire_copy import WireCopy
from zeropp.wire import paths

NOTHING_KEPT = {"prefetch": 0, "live": 0, "reuse": 0}


def calls(
    model: str, micros: int, steps: int, settings: dict[str, Any], loop: bool
) -> list[dict[str, tuple[int, int]]]:
    """Return, for each step and unit, the numbers of gathers and of reductions on the first hop of either path.

    Args:
        model: key of STAGES.
        micros: micro-batches in a step.
        steps: number of steps.
        settings: settings of the configuration.
        loop: True to train by a loop, False to train by ``accumulate``.
    """
    recipe = Recipe(model=model)
    module = build(recipe)
    optimizer = zeropp.ZeroOptimizer(
        make_optimizer(recipe, module), module, make_config(gradient_accumulation_steps=micros, **settings)
    )
    ledger, found = optimizer.engine.comm.ledger, []
    for step in range(steps):
        optimizer.engine.wait_for_refresh()
        ledger.reset()
        if loop:
            for given, batch in pairs(recipe, step, micros):
                optimizer.backward(scored(model, module(given), batch))
        else:
            loss = partial(scored, model)
            zeropp.accumulate(module, pairs(recipe, step, micros), loss, stages=STAGES[model](module))
        optimizer.step()
        optimizer.zero_grad()
        rows = [{row.unit: row.calls for row in ledger.rows if row.kind == kind} for kind in ("gather", "reduce")]
        names = [unit.name for unit in optimizer.engine.units]
        found.append({name: (rows[0].get(name, 0), rows[1].get(name, 0)) for name in names})
    optimizer.close()
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{"reuse": 0}, NOTHING_KEPT], ids=["prefetch", "nothing kept"])
def test_each_unit_is_gathered_twice_a_step_and_reduced_once(settings: dict[str, Any]) -> None:
    """The numbers of gathers also hold in the first step, in which the order is learned.

    The tied embedding is gathered a third time, because forward uses it at its beginning and at its end.
    """
    for micros in (1, 5):
        for found in run_ranks(2, calls, "gpt", micros, 3, settings, False):
            wanted = {name: (3 if name.startswith("embedding") else 2, 1) for name in found[0]}
            assert len(wanted) > 4 and found[1:] == [wanted, wanted]
            assert {name: gathers for name, (gathers, _) in found[0].items()} == {n: g for n, (g, _) in wanted.items()}
    for found in run_ranks(2, calls, "gpt", 5, 3, settings, True):
        assert found[2]["blocks.1"] == (10, 5)


@pytest.mark.campaign
def test_stages_that_are_recomputed_are_gathered_no_more_often() -> None:
    """Without reentrant checkpointing, recomputed blocks are gathered twice a step.

    torch's reentrant checkpointing runs one backward per micro-batch, so it gathers blocks for each of four
    micro-batches.
    """
    for model, gathers in (("gpt, blocks recomputed", 2), ("gpt, blocks reentrant", 5)):
        for found in run_ranks(2, calls, model, 4, 4, NOTHING_KEPT, False):
            assert {found[3][f"blocks.{index}"] for index in range(3)} == {(gathers, 1)}, model


def test_gradients_of_stage_1_are_sent_once() -> None:
    for found in run_ranks(2, calls, "gpt", 4, 2, {"stage": 1}, False):
        assert set(found[1].values()) == {(0, 1)}


def sent(count: int) -> bool:
    """Return True if gradients have been sent before the step, after ``count`` of a window's four micro-batches."""
    recipe = Recipe()
    module = build(recipe)
    config = make_config(stage=1, gradient_accumulation_steps=4)
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, module), module, config)
    zeropp.accumulate(module, pairs(recipe, 0, count), partial(scored, "gpt"), stages=STAGES["gpt"](module))
    found = {gradient.has_unsent() for gradient in optimizer.engine.gradients}
    optimizer.close()
    assert len(found) == 1
    return found == {False}


def test_gradients_go_on_with_the_last_micro_batches_of_a_window() -> None:
    assert run_ranks(2, sent, 3) == [False, False] and run_ranks(2, sent, 4) == [True, True]


def test_an_order_serves_a_loop_and_the_layers() -> None:
    """If steps alternate between a loop and ``accumulate``, the order is learned once.

    The counts equal those of a loop alone and of ``accumulate`` alone.
    """
    for counts, messages in run_ranks(2, in_turn):
        assert counts[2:] == [(6, 3), (2, 1)] * 2
        assert not [text for text in messages if "anew" in text]


def in_turn() -> tuple[list[tuple[int, int]], list[str]]:
    recipe = Recipe(accumulation=3)
    module = build(recipe)
    config = make_config(gradient_accumulation_steps=3, reuse=0, log_trace_cache_warnings=True)
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, module), module, config)
    ledger, found = optimizer.engine.comm.ledger, []
    with logged() as messages:
        for step in range(6):
            ledger.reset()
            if step % 2:
                zeropp.accumulate(module, pairs(recipe, step, 3), partial(scored, "gpt"), stages=STAGES["gpt"](module))
            else:
                for given, batch in pairs(recipe, step, 3):
                    optimizer.backward(scored("gpt", module(given), batch))
            optimizer.step()
            optimizer.zero_grad()
            rows = {row.kind: row.calls for row in ledger.rows if row.unit == "blocks.1"}
            found.append((rows["gather"], rows["reduce"]))
    optimizer.close()
    return found, messages


def live(micros: int) -> list[int]:
    """Return, for each of three steps, the largest number of units that are gathered while a block is used.

    Nothing is prefetched or kept gathered.
    """
    recipe = Recipe()
    module = build(recipe)
    optimizer = zeropp.ZeroOptimizer(make_optimizer(recipe, module), module, make_config(**NOTHING_KEPT))
    units, most = optimizer.engine.units, 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, sum(unit.state is not UnitState.SHARDED for unit in units))

    for block in module.blocks:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    found = []
    for step in range(3):
        most = 0
        zeropp.accumulate(module, pairs(recipe, step, micros), partial(scored, "gpt"), stages=STAGES["gpt"](module))
        optimizer.step()
        optimizer.zero_grad()
        found.append(most)
    optimizer.close()
    return found


def test_no_more_is_gathered_at_once_than_by_a_loop() -> None:
    """At most two units are gathered: the block, and in backward the tied embedding, which is used at both ends."""
    assert run_ranks(2, live, 4) == [[2, 2, 2]] * 2


# Weights that are offloaded.

STATED = Recipe(dtype=torch.float32)  # dtype in which the fused AdamW kernel steps here


def off_the_device(device: str, folder: str, loop: bool) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    """Train four steps of two micro-batches.

    Args:
        device: target of both offloads, "cpu" or "nvme"; "" for none.
        folder: directory of swap files.
        loop: True to train by a loop, False to train by ``accumulate``.

    Returns:
        Whole weights, losses of ``accumulate``, and the number of reads of each block's weights in the last step.
    """
    with host_apart(device == "cpu"):
        return _train_apart(device, folder, loop)


def _train_apart(device: str, folder: str, loop: bool) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    settings: dict[str, Any] = {"reuse": 0, "gradient_accumulation_steps": 2}
    for key in ("offload_param", "offload_optimizer") if device else ():
        settings[key] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    module = build(STATED)
    inner = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    optimizer = zeropp.ZeroOptimizer(inner, module, make_config(**settings))
    sources = {b.wire_copy: unit.name for unit in optimizer.engine.units for b in unit.buffers if b.wire_copy}
    # Rows in host memory are copied where they are; rows in files are read for each gather.
    rows = {source.row.tensor.data_ptr(): name for source, name in sources.items() if source.row is not None}
    losses, reads, begin, put = [], Counter[str](), WireCopy.begin_gather, paths._put

    def read(source: WireCopy, after: Any) -> Any:
        reads[sources[source]] += source.reads
        return begin(source, after)

    def copied(target: Tensor, own: Any) -> None:
        if isinstance(own, Tensor) and own.data_ptr() in rows:
            reads[rows[own.data_ptr()]] += 1
        put(target, own)

    with mock.patch.object(WireCopy, "begin_gather", read), mock.patch.object(paths, "_put", copied):
        for step in range(4):
            reads.clear()
            if loop:
                for given, batch in pairs(STATED, step, 2):
                    optimizer.backward(scored("gpt", module(given), batch))
            else:
                stages = STAGES["gpt"](module)
                losses += zeropp.accumulate(module, pairs(STATED, step, 2), partial(scored, "gpt"), stages=stages)
            optimizer.step()
            optimizer.zero_grad()
    state = zeropp.full_state(module)
    optimizer.close()
    return state, losses, {name: count for name, count in reads.items() if name.startswith("blocks")}


@cache
def on_the_device(world: int) -> list[Any]:
    return run_ranks(world, off_the_device, "", "", False)


@pytest.mark.every(2)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("world", [1, 2])
def test_weights_off_the_device_train_alike_and_are_read_twice(world: int, device: str, tmp_path: Path) -> None:
    offloaded = run_ranks(world, off_the_device, device, str(tmp_path), False)
    for found, wanted in zip(offloaded, on_the_device(world), strict=True):
        assert found[1] == wanted[1] and worst(found[0], wanted[0]) == 0.0
        assert found[2] == {f"blocks.{index}": 2 for index in range(3)}


@pytest.mark.campaign
def test_a_loop_reads_weights_for_each_micro_batch(tmp_path: Path) -> None:
    """A loop over two micro-batches reads weights four times a step; ``accumulate`` reads them twice."""
    for _, _, reads in run_ranks(2, off_the_device, "nvme", str(tmp_path), True):
        assert reads == {f"blocks.{index}": 4 for index in range(3)}
