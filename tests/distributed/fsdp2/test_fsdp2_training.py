"""Weights, losses, gradients, bytes and stored errors of zeropp.fsdp2.

They are compared with the codecs, with unchanged FSDP2 and with plain torch in one process.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zeropp_kernels as kernels
from tests.support.branching_models import apart
from tests.support.fsdp2_models import (
    DTYPES,
    PLAIN,
    buffers,
    gradients,
    hooks,
    plain_gradients,
    sharded,
    units,
    whole,
)
from tests.support.fsdp2_reference import Net, bound, half_scales, rounded, table_of, tensors_of, tokens
from tests.support.rank_pool import run_ranks
from tests.support.used_weights import watch_weights
from zeropp import fsdp2
from zeropp.fsdp2 import routes
from zeropp.fsdp2.reduce import ReduceComm
from zeropp.fsdp2.shards import ShardedUnit

# Weights.


def weights_seen(reshard: bool | int, dtype: str, secondary: str) -> list[str]:
    """Train two steps and compare the weights in forward and backward with shards rounded to int8.

    Weights are rounded once; in backward twice if the secondary gather sends codes.

    Args:
        reshard: FSDP2's ``reshard_after_forward``.
        dtype: compute dtype, a key of ``DTYPES``.
        secondary: "values" or "codes", the encoding of the gather in backward if ``reshard`` is a number.

    Returns:
        Names of parameters whose values differ, with the pass.
    """
    world, wrong = dist.get_world_size(), []
    model = sharded(reshard, dtype)
    cut = units(model)
    fsdp2.apply(model, secondary=secondary)
    expected: dict[str, tuple[Tensor, Tensor]] = {}

    def look(name: str, parameter: nn.Parameter, backward: bool) -> None:
        once, twice = expected[name]
        if not torch.equal(parameter.float(), twice if backward and secondary == "codes" else once):
            wrong.append(f"{name}, {'backward' if backward else 'forward'}")

    watch_weights(model, look)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = dict(model.named_parameters())
    for step in range(2):
        for parameters in cut.values():
            shapes = [values[name].shape for name in parameters]
            table = table_of([whole(values[name]).detach().to(DTYPES[dtype]) for name in parameters], world)
            decoded = torch.stack([rounded(row, 8) for row in table]).to(DTYPES[dtype]).float()
            # The secondary group has two ranks. FSDP2 splits each parameter between them, so the shard of one rank has
            # two of the table's four rows of each parameter, parameter by parameter.
            sizes = [-(-shape[0] // world) * shape[1:].numel() for shape in shapes]
            halves = torch.cat([part.reshape(2, -1) for part in decoded.split(sizes, dim=1)], dim=1)
            twice = torch.stack([rounded(row.to(DTYPES[dtype]), 8) for row in halves]).to(DTYPES[dtype]).float()
            again = torch.cat([part.reshape(world, -1) for part in twice.split([2 * n for n in sizes], dim=1)], dim=1)
            pairs = zip(tensors_of(decoded, shapes), tensors_of(again, shapes), strict=True)
            expected.update(zip(parameters, pairs, strict=True))
        optimizer.zero_grad()
        model(tokens(step, dist.get_rank())).backward()
        optimizer.step()
    return wrong


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("reshard, secondary", [(True, "values"), (False, "values"), (2, "codes"), (2, "values")])
def test_every_rank_computes_with_the_decoded_weights(reshard: bool | int, secondary: str, dtype: str) -> None:
    """Weights are equal in forward and backward.

    The exception are codes in a secondary gather, which round the weights once more for backward.
    """
    assert run_ranks(4, weights_seen, reshard, dtype, secondary, local_world_size=2) == [[]] * 4


# Losses.


def losses(settings: dict[str, Any] | None, reshard: bool | int, dtype: str, steps: int = 5) -> list[float]:
    """Train, and return each step's loss, the mean over ranks.

    Args:
        settings: arguments of ``fsdp2.apply``; None for unchanged FSDP2.
        reshard: FSDP2's ``reshard_after_forward``.
        dtype: compute dtype, a key of ``DTYPES``.
        steps: number of steps.
    """
    model = sharded(reshard, dtype)
    if settings is not None:
        fsdp2.apply(model, **settings)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    return found


def loss_bounds(steps: int = 5, world: int = 4) -> tuple[list[float], list[float]]:
    """Train in one process, and bound the change of each loss by quantization.

    The bounds are for 8-bit weights and gradients of 8 and 4 bits, to first order. The error of a weight is half a
    quantization step of its own, plus the learning rate times the errors of all earlier gradients. The change of a loss
    is at most the sum of weight errors times absolute gradients.

    Returns:
        The losses, and the bound of each.
    """
    model = Net()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    drift = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in trained.items()}
    found, limits = [], []
    cut = {"": [name for name in trained if "blocks" not in name]}
    cut |= {f"{index}": [name for name in trained if f"blocks.{index}." in name] for index in range(2)}
    for step in range(steps):
        plain, values = [], []
        for rank in range(world):
            model.zero_grad()
            loss = model(tokens(step, rank))
            loss.backward()
            values.append(loss.item())
            plain.append({name: p.grad.clone() for name, p in trained.items()})
        found.append(sum(values) / world)
        limit = 0.0
        for names in cut.values():
            shapes = [trained[name].shape for name in names]
            weights = table_of([trained[name].detach() for name in names], world)
            codes = tensors_of(half_scales(weights, 8), shapes)
            tables = [table_of([each[name] for name in names], world) for each in plain]
            errors = tensors_of(bound(tables, 2, (8, 4)), shapes)
            for name, code, error in zip(names, codes, errors, strict=True):
                mean = torch.stack([each[name] for each in plain]).mean(0)
                limit += float(((code + drift[name]) * mean.abs()).sum())
                drift[name] += 0.3 * error
                trained[name].data -= 0.3 * mean
        limits.append(limit)
    return found, limits


@pytest.mark.every(2)
@pytest.mark.parametrize("reshard", [True, 2])
def test_losses_stay_within_the_codecs_bound(reshard: bool | int) -> None:
    """Losses with codes differ from those of unchanged FSDP2 by at most twice the first-order bound.

    Unchanged FSDP2 gives the losses of one process.
    """
    single, limits = loss_bounds()
    assert single[0] > single[-1]
    usual = run_ranks(4, losses, None, reshard, "fp32", local_world_size=2)[0]
    assert usual == pytest.approx(single, rel=1e-4)
    twice = [] if reshard is True else [{"secondary": "codes"}]
    for settings in ({}, {"feedback": "both", "hadamard": True}, *twice):
        for found in run_ranks(4, losses, settings, reshard, "fp32", local_world_size=2):
            assert found != usual
            for step, (value, other, limit) in enumerate(zip(found, usual, limits, strict=True)):
                assert abs(value - other) <= 2 * limit + 1e-6, f"step {step}: {value}, {other}, {limit}"
                assert value == pytest.approx(other, rel=0.03)


@pytest.mark.campaign
def test_losses_in_bf16() -> None:
    usual = run_ranks(4, losses, None, 2, "bf16", local_world_size=2)[0]
    for found in run_ranks(4, losses, {"feedback": "cross"}, 2, "bf16", local_world_size=2):
        assert found == pytest.approx(usual, rel=0.05) and found != usual


# Plain values over two hops.


def compared(reshard: bool | int, dtype: str) -> tuple[list[float], list[float], float]:
    """Train with plain hops and with unchanged FSDP2.

    Returns:
        Losses with plain hops, losses of unchanged FSDP2, and the largest relative difference of a parameter's
        gradient.
    """
    ours, usual = sharded(reshard, dtype), sharded(reshard, dtype)
    fsdp2.apply(ours, **PLAIN)
    found: tuple[list[float], list[float]] = ([], [])
    worst = 0.0
    for step in range(3):
        for model, values in zip((ours, usual), found, strict=True):
            model.zero_grad()
            loss = model(tokens(step, dist.get_rank()))
            loss.backward()
            values.append(loss.item())
        one, two = gradients(ours), gradients(usual)
        worst = max(worst, *(apart(one[name], two[name]) / float(two[name].abs().max()) for name in two))
        with torch.no_grad():
            for p in (p for model in (ours, usual) for p in model.parameters() if p.grad is not None):
                p -= 0.1 * p.grad
    return *found, worst


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("reshard", [True, 2])
def test_plain_hops_are_fsdp2_up_to_the_order_of_sums(reshard: bool | int, dtype: str) -> None:
    for ours, usual, worst in run_ranks(4, compared, reshard, dtype, local_world_size=2):
        assert ours == pytest.approx(usual, abs=1e-6) and ours[0] == usual[0]
        assert worst < 3e-6


def exact(reshard: bool | int) -> list[str]:
    """Return the parameters whose float64 gradients differ from plain torch's by more than a relative 1e-12."""
    model = sharded(reshard, "fp64", "fp64", lambda: Net().double())
    fsdp2.apply(model, **PLAIN)
    model(tokens(0, dist.get_rank())).backward()
    found, plain = gradients(model), plain_gradients(0, "fp64")
    means = {name: torch.stack([each[name] for each in plain]).mean(0) for name in plain[0]}
    return [name for name, mean in means.items() if apart(found[name], mean) > 1e-12 * float(mean.abs().max())]


@pytest.mark.every(2)
@pytest.mark.parametrize("reshard", [True, 2])
def test_gradients_in_float64_are_summed_in_it(reshard: bool | int) -> None:
    """A sum in float32 would differ by about 1e-7."""
    assert run_ranks(4, exact, reshard, local_world_size=2) == [[]] * 4


# Bytes.


Rows = dict[tuple[str, str, str, str], tuple[int, int, str]]  # unit, kind, hop, link -> calls, bytes, codec


def sent(settings: dict[str, Any], reshard: bool | int) -> tuple[Rows, dict[str, tuple[int, int, int]]]:
    """Run one step.

    Args:
        settings: arguments of ``fsdp2.apply``.
        reshard: FSDP2's ``reshard_after_forward``.

    Returns:
        The ledger's rows, and for each unit three numbers of elements of one rank's shard: all, trained, and those of
        one-dimensional parameters.
    """
    model = sharded(reshard)
    adapter = fsdp2.apply(model, **settings)
    cut, world = units(model), dist.get_world_size()
    values = dict(model.named_parameters())
    sizes = {}
    for unit, names in cut.items():
        rows = [-(-values[name].size(0) // world) * values[name].shape[1:].numel() for name in names]
        trained = [row for row, name in zip(rows, names, strict=True) if values[name].requires_grad]
        vectors = [row for row, name in zip(rows, names, strict=True) if values[name].ndim == 1]
        sizes[unit] = (sum(rows), sum(trained), sum(vectors))
    model(tokens(0, dist.get_rank())).backward()
    text = str(adapter)
    assert all(unit in text for unit in cut) and f"{adapter.ledger.total_bytes:,}" in text
    return {(r.unit, r.kind, r.hop, r.link): (r.calls, r.bytes, r.codec) for r in adapter.ledger.rows}, sizes


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("settings", "reshard"),
    [({"secondary": "codes"}, 2), *((s, r) for r in (True, 2) for s in ({}, PLAIN, {"gather_hops": 1}))],
    ids=str,
)
def test_bytes_are_those_of_the_message_layouts(settings: dict[str, Any], reshard: bool | int) -> None:
    """The ledger's calls, bytes and codecs equal those computed from the sizes of shards."""
    plain = settings is PLAIN
    weight = "fp32" if plain else "int8"
    for rows, sizes in run_ranks(4, sent, settings, reshard, local_world_size=2):
        wanted = {}
        for unit, (numel, trained, vectors) in sizes.items():
            shard = 4 * numel if plain else kernels.message_layout(numel, 8).nbytes
            # With reshard_after_forward=True, backward gathers the weights again. This includes the root, because
            # `sharded` gives the setting to the root, too.
            times = 2 if reshard is True else 1
            if settings.get("gather_hops") == 1:
                wanted[unit, "gather", "4->1", "cross"] = (times, times * 3 * shard, weight)
            else:
                wanted[unit, "gather", "4->2", "cross"] = (times, times * shard, weight)
                wanted[unit, "gather", "2->1", "local"] = (2 * times, times * 2 * shard, weight)  # one call per node
            if reshard == 2:
                coded = settings.get("secondary") == "codes"
                nbytes = kernels.message_layout(2 * numel, 8).nbytes if coded else 4 * 2 * numel
                wanted[unit, "second", "2->1", "local"] = (1, nbytes, "int8" if coded else "fp32")
            # A plain value takes the bytes of four codes: 16 bits beside int4, 32 bits beside int8.
            piece = -(-trained // 256) * 256 + -(-4 * vectors // 256) * 256
            pair = (8 * trained, 4 * trained)
            if not plain:
                pair = (kernels.message_layout(2 * piece, 8).nbytes, kernels.message_layout(piece, 4).nbytes)
            wanted[unit, "reduce", "1->2", "local"] = (1, pair[0], "fp32" if plain else "int8+fp32")
            wanted[unit, "reduce", "2->4", "cross"] = (1, pair[1], "fp32" if plain else "int4+bf16")
        assert rows == wanted


# Error feedback.


def fed(feedback: str | None) -> tuple[float, float, list[str]]:
    """Reduce the same gradient several times with 4 bits.

    With feedback, also save, load and reset the errors, and reduce without one parameter.

    Args:
        feedback: "cross", "both" or None.

    Returns:
        Relative error of one gradient, relative error of the mean of twelve, and descriptions of wrong states.
    """
    model, wrong = sharded(), []
    adapter = fsdp2.apply(model, weights=None, gradient_bits=(4, 4), feedback=feedback)
    _, reduce, group = hooks(model.blocks[0])
    rank, world = dist.get_rank(), dist.get_world_size()
    size = reduce.numel(reduce.parts or reduce.unit.trained()) // world
    tables = buffers(size, torch.float32)
    mean = torch.stack(tables).mean(0)[rank]

    def one() -> Tensor:
        out = torch.empty(size)
        reduce(out, tables[rank].clone().view(-1), group, dist.ReduceOp.AVG)
        reduce.finish_reduction(out)
        return out

    first = one()
    outs = [first] + [one() for _ in range(11)]
    single, several = ((each - mean).norm() / mean.norm() for each in (first, torch.stack(outs).mean(0)))
    if feedback is not None:
        state = adapter.state_dict()
        if sum(name.startswith("blocks.0 ") for name in state) != {"cross": 1, "both": 2}[feedback]:
            wrong.append(f"state has {list(state)}")
        following = one()
        for how in ("loaded", "loaded after a reset"):
            adapter.load_state_dict(state)
            wrong += [] if torch.equal(one(), following) else [f"a state that was {how} gave another gradient"]
            adapter.reset_feedback()
        if any(bool(each.any()) for each in adapter.state_dict().values()):
            wrong.append("a cleared state is not empty")
        wrong += [] if torch.equal(one(), first) else ["a cleared state gave another gradient"]
        with pytest.raises(ValueError, match="trained parameters, ranks and settings"):
            adapter.load_state_dict({})
        reduce.note_parts(reduce.parts[1:])
        with pytest.raises(RuntimeError, match=r"\['blocks.0.0.weight'\] have no gradient.*set_reduce_scatter_unused"):
            reduce(torch.empty(8), torch.empty(8 * world), group, dist.ReduceOp.AVG)
    return float(single), float(several), wrong


def test_feedback_adds_encoding_errors_to_the_next_gradient() -> None:
    """With feedback, errors of equal gradients mostly cancel in their mean. Without it, each has the same error."""
    for single, several, _ in run_ranks(4, fed, None, local_world_size=2):
        assert several == pytest.approx(single)
    one = run_ranks(4, fed, "cross", local_world_size=2)
    for both, cross in zip(run_ranks(4, fed, "both", local_world_size=2), one, strict=True):
        single, several, wrong = both
        assert wrong == cross[2] == [] and several < cross[1] < single and several < 0.35 * single


def kept_share(beta: float | None) -> Tensor:
    """Return the third of three reductions of the same gradient.

    Args:
        beta: factor on the old error; None for the default.
    """
    model = sharded()
    fsdp2.apply(model, weights=None, feedback="cross", beta=beta)
    _, reduce, group = hooks(model.blocks[0])
    rank, world = dist.get_rank(), dist.get_world_size()
    size = reduce.numel(reduce.parts) // world
    out = torch.empty(size)
    for _ in range(3):
        given = buffers(size, torch.float32)[rank]
        reduce(out, given.view(-1), group, dist.ReduceOp.AVG)
        reduce.finish_reduction(out)
    return out


def test_the_share_of_an_old_error_that_is_kept_is_a_setting() -> None:
    """The default of ``beta`` is 0.8."""
    usual, same, less = (run_ranks(4, kept_share, beta, local_world_size=2) for beta in (None, 0.8, 0.2))
    for rank in range(4):
        assert torch.equal(usual[rank], same[rank]) and not torch.equal(usual[rank], less[rank])


def frozen_units(feedback: str) -> tuple[list[float], list[str]]:
    """Train a model with a frozen block, as with LoRA, and return the losses and the names of stored errors."""
    model = Net()
    model.blocks[0].requires_grad_(False)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    adapter = fsdp2.apply(model, feedback=feedback)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(4):
        loss = model(tokens(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(adapter.state_dict())


@pytest.mark.every(2)
@pytest.mark.parametrize("feedback", ["cross", "both"])
def test_units_that_are_frozen_wholly_carry_no_errors(feedback: str) -> None:
    results = run_ranks(4, frozen_units, feedback, local_world_size=2)
    for losses, names in results:
        assert losses[-1] < losses[0]
        assert names and not any(name.startswith("blocks.0 ") for name in names)


def fails_half_way() -> list[str]:
    """Let ``apply`` fail at its last unit, and return the names of hooks that are not FSDP2's own afterwards."""
    model = sharded()
    made = routes.ReduceComm

    def failing(unit: ShardedUnit, *args: Any) -> ReduceComm:
        if unit.name == "blocks.1":
            raise MemoryError("no room for this one")
        return made(unit, *args)

    with mock.patch.object(routes, "ReduceComm", failing), pytest.raises(MemoryError):
        fsdp2.apply(model, feedback="cross")
    left = [name for module in (*model.blocks, model) for name in map(type_name, hooks(module)[:2])]
    fsdp2.apply(model, feedback="cross")  # no hook was left that would make a second call fail
    return [name for name in left if not name.startswith("Default")]


def type_name(value: object) -> str:
    return type(value).__name__


def test_a_failure_changes_nothing() -> None:
    """Hooks are installed only after those of all units have been created."""
    assert run_ranks(4, fails_half_way, local_world_size=2) == [[]] * 4
