"""Refreshes by differences: "lossless" ones give the bits of whole weights, and "delta4" ones send four bits.

Ranks find cached weights that differ between them, and renew them.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
import zeropp_kernels as kernels
from tests.support.branching_models import make_config
from tests.support.quantized_model import Model, tokens
from tests.support.rank_pool import RankFailure, run_ranks, some
from tests.support.used_weights import watch_weights
from zeropp.engine.engine import Engine

BF16 = {"bf16": {"enabled": True}}
HPZ: dict[str, object] = {**BF16, "zero_hpz_partition_size": 2}
PLACED: dict[str, dict[str, object]] = {
    "hpz": HPZ,
    "hpz, most parameters persistent": {**HPZ, "persist": 2000},
    "hpz, accumulation": {**HPZ, "gradient_accumulation_steps": 2, "defer_cross_reduction": True},
    "hpz, quantized gradients": {**HPZ, "zero_quantized_gradients": True, "zeropp_loco_param": {}},
    "mics with hpz": {**HPZ, "mics_shard_size": 4},
    "stage 1": {**BF16, "stage": 1},
    "stage 2, no overlap": {**BF16, "stage": 2, "overlap_comm": False},
}


def wrapped(settings: dict[str, object], lr: float, freeze: bool = False) -> tuple[Model, zeropp.ZeroOptimizer]:
    """Return a model and its optimizer.

    Args:
        settings: keys for ``make_config``.
        lr: learning rate of AdamW.
        freeze: True to freeze block 0.
    """
    model = Model()
    model.blocks[0].requires_grad_(not freeze)
    return model, zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=lr), model, make_config(**settings))


def train(model: nn.Module, optimizer: Any, step: int, *, spoilt: bool = False, fault: bool = False) -> float:
    """Train one step, and return the loss of the last micro-batch.

    Args:
        model: wrapped model.
        optimizer: its optimizer.
        step: number of the step, which chooses the data.
        spoilt: True for a NaN loss on the last rank, so that all ranks skip the step.
        fault: True to flip a bit in the last rank's cached weights between backward and step.
    """
    optimizer.zero_grad()
    loss = torch.zeros(())
    for micro in range(optimizer.config.gradient_accumulation_steps or 1):
        loss = model(tokens(100 * step + micro, dist.get_rank()))
        bad = spoilt and dist.get_rank() == dist.get_world_size() - 1
        optimizer.backward(loss * (float("nan") if bad else 1.0))
    if fault:
        flip_a_bit(optimizer.engine)
    optimizer.step()
    assert optimizer.step_was_skipped is spoilt
    return loss.item()


def flip_a_bit(engine: Engine) -> None:
    """Flip a bit in the middle of the last rank's cached weights of one parameter."""
    engine.wait_for_refresh()
    if engine.comm.rank == engine.comm.world - 1:
        buffer = next(buffer for buffer in engine.buffers if buffer.base is not None)
        level = buffer.placement.mode.cached
        index = buffer.placement.chain.slice_index(engine.comm.rank, level)
        part = max(buffer.layout.fragments(index, level), key=lambda part: part.stop - part.start)
        buffer.base.view(torch.int16)[part.offset + (part.stop - part.start) // 2] ^= 64


def refreshes(engine: Engine) -> dict[str, int]:
    """Return the number of refreshes by their way: differences, whole weights, or whole because of their size."""
    engine.wait_for_refresh()
    found: Counter[str] = Counter()
    for (_, what), times in engine.comm.ledger.events.items():
        found[what] += times
    return dict(found)


DIFFERENCES, WHOLE, CROWDED = "refresh: differences", "refresh: whole", "refresh: whole, too much has changed"
FAULT = "cached weights differ between ranks"


# Lossless differences.


def eventful(settings: dict[str, object], steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, int], int]:
    """Train with every event that changes weights: a skipped step, a load, an edit, a resumption and a flipped bit.

    Args:
        settings: keys for ``make_config``.
        steps: number of steps.

    Returns:
        The losses, the full weights, the number of refreshes by way, and the number of buffers with cached weights.
    """
    model, optimizer = wrapped(settings, lr=1e-3)
    engine, losses, faults = optimizer.engine, [], 0
    optimizer.step_sync.cache_checksum.every = steps // 3
    skipped, evaluated, loaded, edited, resumed = (steps * k // 10 for k in range(1, 6))
    for step in range(steps):
        fault = step > steps // 2 and faults == 0 and optimizer.step_sync.cache_checksum.due
        faults += fault
        losses.append(train(model, optimizer, step, spoilt=step == skipped, fault=fault))
        if step == evaluated:
            model.eval()
            with torch.no_grad():
                losses.append(float(model(tokens(7, dist.get_rank()))))
            model.train()
        if step == loaded:
            model.load_state_dict({key: value + 0.01 for key, value in model.state_dict().items()})
        if step == edited:
            with zeropp.zero.GatheredParameters(model.head.weight, modifier_rank=0), torch.no_grad():
                model.head.weight.mul_(0.5)
        if step == resumed:
            state = copy.deepcopy(optimizer.state_dict())
            losses.append(train(model, optimizer, 999))
            optimizer.load_state_dict(state)
    kept = [buffer.base for buffer in engine.buffers if buffer.base is not None]
    return losses, zeropp.full_state(model), refreshes(engine), len(kept)


def both(settings: dict[str, object], steps: int) -> tuple[list[str], dict[str, int], int]:
    """Run :func:`eventful` with and without lossless differences.

    Returns:
        Losses and weights that differ, the number of refreshes by way, and the number of buffers with cached weights.
    """
    losses, weights, _, _ = eventful(settings, steps)
    found, others, renewed, buffers = eventful({**settings, "weight_codec": "lossless"}, steps)
    wrong = [f"loss {index}" for index, pair in enumerate(zip(losses, found, strict=True)) if pair[0] != pair[1]]
    wrong += [name for name, value in weights.items() if not torch.equal(value, others[name])]
    return wrong, renewed, buffers


STEPS = [pytest.param(*each.values, 24, marks=each.marks) for each in some(PLACED, 2)]
STEPS += [pytest.param(name, 200, marks=pytest.mark.campaign) for name in PLACED]


@pytest.mark.every(8)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "steps"), STEPS)
def test_exact_differences_change_no_bit(name: str, steps: int) -> None:
    """Losses and weights stay equal through an evaluation, a skipped step, a load, an edit, a resume and a fault."""
    for wrong, renewed, buffers in run_ranks(4, both, PLACED[name], steps, local_world_size=2, timeout=280):
        assert wrong == []
        assert renewed[FAULT] == 1, "the fault was not found, or found more than once"
        # Whole weights are sent at the start, after the load, after the resumption and after the fault, and for the one
        # buffer that was edited.
        assert renewed[WHOLE] == 4 * buffers + 1
        # Of the steps + 1 steps that ran, one was skipped, and the one that found the fault sent whole weights.
        assert renewed[DIFFERENCES] + renewed.get(CROWDED, 0) == (steps - 1) * buffers
        assert renewed.get(CROWDED, 0) < 0.05 * steps * buffers


def found_late(settings: dict[str, object]) -> tuple[list[int], list[str]]:
    """Flip a bit at step 13, long before the comparison at step 19.

    Returns:
        The steps after which a fault was counted, and sums of this rank's cached weights at the end.
    """
    model, optimizer = wrapped({**settings, "weight_codec": "lossless"}, lr=1e-3)
    engine, checksum = optimizer.engine, optimizer.step_sync.cache_checksum
    checksum.every = 10
    faults, seen = [], 0
    for step in range(30):
        if step == 13:
            flip_a_bit(engine)
        train(model, optimizer, step)
        count = refreshes(engine).get(FAULT, 0)
        faults += [step] * (count - seen)
        seen = count
    keeps = [str(buffer.base.double().sum()) for buffer in engine.buffers if buffer.base is not None]
    return faults, keeps


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 1", "hpz"])
def test_a_fault_that_was_computed_with_is_found_at_the_next_comparison_and_once(name: str) -> None:
    """Ranks compare every ten steps. After the comparison, ranks with the same slice have the same weights."""
    results = run_ranks(4, found_late, PLACED[name], local_world_size=2)
    assert [faults for faults, _ in results] == [[19]] * 4
    alike = [results[1], results[3]] if name == "hpz" else results  # ranks 1 and 3 cache the slice with the flipped bit
    assert len({tuple(keeps) for _, keeps in alike}) == 1


def between_backwards(fault: bool) -> tuple[dict[str, Tensor], int]:
    """Run two forwards, and compare the cached weights between their two backwards, by computing the norm.

    Args:
        fault: True to flip a bit before the comparison.

    Returns:
        The weights after a step, and the number of faults found.
    """
    model, optimizer = wrapped({**HPZ, "weight_codec": "lossless", "live": 0}, lr=1e-3)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.step_sync.cache_checksum.every = 1
    first, second = (model(tokens(micro, dist.get_rank())) for micro in range(2))
    first.backward()
    if fault:
        flip_a_bit(optimizer.engine)
    optimizer.clip_grad_norm_(1e9)
    second.backward()
    optimizer.step()
    return zeropp.full_state(model), refreshes(optimizer.engine).get(FAULT, 0)


def test_a_backward_uses_weights_renewed_by_a_comparison_before_it() -> None:
    """Main weights are unchanged, so the graph of the second forward stays valid.

    The damaged weights are renewed before the second backward gathers them.
    """
    sound, faulty = (run_ranks(4, between_backwards, fault, local_world_size=2) for fault in (False, True))
    for (weights, none), (found, one) in zip(sound, faulty, strict=True):
        assert (none, one) == (0, 1)
        assert [name for name, value in weights.items() if not torch.equal(value, found[name])] == []


def crowd(settings: dict[str, object]) -> tuple[list[str], dict[str, int]]:
    """Train with steps so large that differences take more bytes than weights.

    Returns:
        Weights that differ between lossless differences and whole weights, and the number of refreshes by way.
    """
    results = []
    for codec in ({}, {"weight_codec": "lossless"}):
        model, optimizer = wrapped({**settings, **codec}, lr=0.5)
        losses = [train(model, optimizer, step) for step in range(6)]
        results.append((losses, zeropp.full_state(model), refreshes(optimizer.engine)))
    (losses, weights, _), (others, found, renewed) = results
    wrong = [name for name, value in weights.items() if not torch.equal(value, found[name])]
    return wrong + ["losses"] * (losses != others), renewed


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 1", "hpz"])
def test_where_too_much_has_changed_all_ranks_send_weights(name: str) -> None:
    """Messages have one size on all ranks, so all send whole weights if the differences of one rank are too large."""
    for wrong, renewed in run_ranks(4, crowd, PLACED[name], local_world_size=2):
        assert wrong == []
        assert renewed[CROWDED] >= 6, "too few refreshes sent whole weights because of their size"


# Differences in four bits.


def followed(settings: dict[str, object]) -> list[str]:
    """Train five steps with "delta4".

    Returns:
        Names of parameters that differ, in a forward or backward, from a base to which each step's difference was added
        in four bits.
    """
    model, optimizer = wrapped({**settings, "weight_codec": "delta4"}, lr=1e-2)
    wrong: list[str] = []
    bases = {name: value.bfloat16() for name, value in zeropp.full_state(model).items()}

    def look(name: str, parameter: nn.Parameter, _: bool) -> None:
        if not torch.equal(parameter, bases[name]):
            wrong.append(name)

    watch_weights(model, look)
    for step in range(5):
        train(model, optimizer, step)
        # A load sends whole weights, so the base is the rounded weight again and earlier rounding errors are gone.
        if step == 3:
            model.load_state_dict(model.state_dict())
        for name, value in zeropp.full_state(model).items():
            if step == 3:
                bases[name] = value.bfloat16()
                continue
            flat, base = value.reshape(-1), bases[name].reshape(-1)
            message = torch.empty(kernels.message_layout(flat.numel(), 4).nbytes, dtype=torch.uint8)
            kernels.delta_encode_(flat, base, message, update=False)
            kernels.delta_apply_(message, base)
            bases[name] = base.view(value.shape)
    return wrong


@pytest.mark.every(6)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", some(PLACED, 3))
def test_four_bit_differences_reach_every_rank_and_include_earlier_errors(world: int, name: str) -> None:
    """Differences are taken from the rounded base, so each one includes the rounding errors of earlier ones."""
    settings = PLACED[name]
    if world == 2 and "zero_hpz_partition_size" in settings:
        settings = {**settings, "zero_hpz_partition_size": 1, "stage": 2}
    if world == 2:
        settings = {**settings, "mics_shard_size": -1}
    assert run_ranks(world, followed, settings, local_world_size=2) == [[]] * world


# Bytes, refused settings, and ranks that refresh at different times.


def sent(settings: dict[str, object]) -> tuple[dict[tuple[str, str, str], float], dict[str, int]]:
    """Train four steps.

    Args:
        settings: keys for ``make_config``.

    Returns:
        Bytes per call of the last step's refreshes, by (unit, hop, codec), and the elements of each unit.
    """
    model, optimizer = wrapped(settings, lr=1e-4)
    engine = optimizer.engine
    for step in range(4):
        engine.wait_for_refresh()
        dist.barrier()
        engine.comm.ledger.reset()
        train(model, optimizer, step)
    engine.wait_for_refresh()
    rows = {(r.unit, r.hop, r.codec): r.bytes / r.calls for r in engine.comm.ledger.rows if r.kind == "refresh"}
    return rows, {unit.name: unit.numel for unit in engine.units}


@pytest.mark.every(2)
@pytest.mark.parametrize("codec", ["delta4", "lossless"])
@pytest.mark.parametrize("placed", [{**HPZ}, {**BF16, "stage": 1}], ids=str)
def test_bytes_are_those_of_differences(codec: str, placed: dict[str, object]) -> None:
    """Lossless messages have four bits per element, and up to half as many bytes for larger differences."""
    for rows, numels in run_ranks(4, sent, {**placed, "weight_codec": codec}, local_world_size=2):
        hops = {"4->2": 1} if "zero_hpz_partition_size" in placed else {"4->2": 1, "2->1": 2}
        assert set(rows) == {(unit, hop, codec) for unit in numels for hop in hops}
        if codec == "delta4":
            for (unit, hop, _), nbytes in rows.items():
                assert nbytes == hops[hop] * kernels.message_layout(numels[unit] // 4, 4).nbytes
        else:
            layouts = {unit: kernels.lossless_layout(numel // 4, 0, 0) for unit, numel in numels.items()}
            codes = sum(hops[hop] * layouts[unit].codes_nbytes for unit, hop, _ in rows)
            assert codes < sum(rows.values()) < 1.5 * codes, "differences of a small step take 4 bits and little more"


def refused(settings: dict[str, object]) -> None:
    """Wrap a model with settings that are refused."""
    wrapped(settings, lr=0.1)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"zero_hpz_partition_size": 2}, "has the compute dtype fp32; set"),
    ({**HPZ, "zero_quantized_weights": True}, "ask for different codecs"),
    ({**HPZ, "secondary": "codes"}, "caches codes; leave secondary"),
    (BF16, "stage 3 caches none; set zero_hpz_partition_size"),
    ({**BF16, "zero_hpz_partition_size": 4}, "makes none: no more than"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message for _, message in REFUSED])
@pytest.mark.parametrize("codec", some(["delta4", "lossless"], 2))
def test_differences_that_have_no_base_are_refused(codec: str, settings: dict[str, object], message: str) -> None:
    failures = run_ranks(4, refused, {**settings, "weight_codec": codec}, local_world_size=2, catch=True)
    for failure in failures:
        assert isinstance(failure, RankFailure) and message in failure.message


def half_a_step(settings: dict[str, object], how: str, freeze: bool) -> list[str]:
    """Train with a rank that starts refreshes at other times than the other ranks.

    Args:
        settings: keys for ``make_config``.
        how: "error" to interrupt rank 1's optimizer after its second chunk, "hook" to give rank 1 a step post-hook,
            which delays its refreshes.
        freeze: True to freeze block 0.

    Returns:
        Names of weights that differ from a run without differences.
    """
    model, optimizer = wrapped({**settings, "weight_codec": "lossless"}, lr=1e-3, freeze=freeze)
    plain, other = wrapped(settings, lr=1e-3, freeze=freeze)
    for each, own in ((model, optimizer), (plain, other)):
        for step in range(3):
            train(each, own, step)
        calls = [0]
        if how == "hook" and dist.get_rank() == 1:
            own.register_step_post_hook(lambda *_: None)
        if how == "error":
            update = torch.optim.AdamW.step
            inner = getattr(update, "__wrapped__", update)

            def failing(self: Any, *args: Any, inner: Any = inner, calls: list[int] = calls) -> None:
                inner(self, *args)
                calls[0] += 1
                if calls[0] == 2 and dist.get_rank() == 1:
                    raise KeyboardInterrupt("in the middle")

            torch.optim.AdamW.step = failing  # type: ignore[method-assign]
            alone = pytest.raises(KeyboardInterrupt, match="in the middle") if dist.get_rank() == 1 else None
            try:
                with alone or contextlib.nullcontext():
                    train(each, own, 3)
            finally:
                torch.optim.AdamW.step = update  # type: ignore[method-assign]
        for step in range(4, 7):
            train(each, own, step)
        with torch.no_grad():
            each(tokens(7, dist.get_rank()))  # a rank with a post-hook starts its last refresh in this forward
    weights, expected = zeropp.full_state(model), zeropp.full_state(plain)
    return [name for name, value in expected.items() if not torch.equal(value, weights[name])]


@pytest.mark.every(12)
@pytest.mark.parametrize("freeze", [False, True], ids=["all trained", "one frozen"])
@pytest.mark.parametrize("how", ["error", "hook"])
@pytest.mark.parametrize("name", ["hpz", "stage 1"])
def test_ranks_that_start_refreshes_in_other_cuts_agree_all_the_same(name: str, how: str, freeze: bool) -> None:
    """The chunks of units, for which ranks agree on sizes, do not depend on the time when a rank starts refreshes.

    Frozen blocks are not stepped, so they are not counted in the chunks.
    """
    assert run_ranks(4, half_a_step, PLACED[name], how, freeze, local_world_size=2) == [[]] * 4


def unfrozen(settings: dict[str, object]) -> list[float]:
    """Return the losses of a bfloat16 model with frozen float32 norms that are trained from the second step on.

    Such norms have no base for differences.
    """
    model = Model(torch.bfloat16)
    for block in model.blocks:
        block[1].float().requires_grad_(False)
        block.forward = lambda x, block=block: block[1](block[0](x).float()).bfloat16()  # type: ignore[method-assign]
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model, make_config(**settings))
    losses = [train(model, optimizer, 0)]
    for block in model.blocks:
        block[1].requires_grad_(True)
    return losses + [train(model, optimizer, step) for step in range(1, 4)]


def test_a_parameter_of_another_dtype_that_is_trained_later_travels_whole() -> None:
    settings: dict[str, object] = {"stage": 1}
    plain = run_ranks(4, unfrozen, settings, local_world_size=2)
    assert run_ranks(4, unfrozen, {**settings, "weight_codec": "lossless"}, local_world_size=2) == plain
