"""Quantized weights are equal on every rank at any number of ranks, and quantized gradients are within a bound.

Results are compared with plain torch in one process on the same global batch. Each parameter's gradient is checked
alone, with SGD, because another optimizer could hide a wrong factor.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
import zeropp_kernels as kernels
from tests.support.branching_models import make_config
from tests.support.owned_memory import owned_bytes
from tests.support.quantized_model import GRADIENTS, WEIGHTS, Model, bound, decoded, tokens, wrapped
from tests.support.rank_pool import run_ranks
from tests.support.used_weights import watch_weights

# Nodes x ranks per node: total number of ranks, ranks per node.
SHAPES = {"1x4": (4, 4), "2x2": (4, 2), "4x1": (4, 1), "3x2": (6, 2)}


# Weights.


def weights_seen(settings: dict[str, object]) -> list[str]:
    """Return the parameters that differ from their decoded codes in any forward or backward of three steps."""
    model, optimizer = wrapped(make_config(**settings), lr=0.1)
    wrong: list[str] = []
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32
    expected: dict[str, Tensor] = {}

    def look(name: str, parameter: nn.Parameter, _: bool) -> None:
        if parameter.is_contiguous() and not torch.equal(parameter, expected[name].to(dtype)):
            wrong.append(name)

    watch_weights(model, look)
    for step in range(3):
        expected.update({name: decoded(value) for name, value in zeropp.full_state(model).items()})
        optimizer.zero_grad()
        model(tokens(step, dist.get_rank())).backward()
        optimizer.step()
    return wrong


PLACED: dict[str, dict[str, object]] = {
    "stage 3": {},
    "one unit": {"unit_min_blocks": 1000, "unit_numel": 0},
    "persistent": {"persist": 10**6},
    "hpz": {"zero_hpz_partition_size": 2},
    "hpz, codes": {"zero_hpz_partition_size": 2, "secondary": "codes"},
    "mics": {"mics_shard_size": 2},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3, bf16": {"bf16": {"enabled": True}},
    "hpz, codes, bf16": {"zero_hpz_partition_size": 2, "secondary": "codes", "bf16": {"enabled": True}},
}


@pytest.mark.every(12)
@pytest.mark.parametrize(
    ("world", "name"), [(w, name) for w in (1, 2, 4) for name in PLACED if (w, name) != (1, "mics")]
)
def test_every_rank_computes_with_the_decoded_weights(world: int, name: str) -> None:
    """Weights do not depend on placement, units and number of ranks, and are equal in forward and backward."""
    results = run_ranks(world, weights_seen, {**WEIGHTS, **PLACED[name]}, local_world_size=min(world, 2))
    assert results == [[]] * world


# Gradients.


def gradients_of(settings: dict[str, object]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Take one step with SGD at a learning rate of 1, so that the change of the weights is the gradient.

    Args:
        settings: keys for ``make_config``.

    Returns:
        The gradient over all micro-batches, and the gradients of every rank in plain torch.
    """
    model, optimizer = wrapped(make_config(**settings), lr=1.0)
    micros = optimizer.config.gradient_accumulation_steps or 1
    before = zeropp.full_state(model)
    for micro in range(micros):
        optimizer.backward(model(tokens(micro, dist.get_rank())))
    optimizer.step()
    after = zeropp.full_state(model)
    plain = []
    for rank in range(dist.get_world_size()):
        other = Model()
        for micro in range(micros):
            (other(tokens(micro, rank)) / micros).backward()
        plain.append({n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in other.named_parameters()})
    return {name: before[name] - after[name] for name in before}, plain


QUANTIZED: dict[str, tuple[dict[str, object], tuple[int, int]]] = {
    "default": ({}, (8, 4)),
    "both 4": ({"gradient_bits": {"local": 4, "cross": 4}}, (4, 4)),
    "both 8": ({"gradient_bits": {"local": 8, "cross": 8}}, (8, 8)),
    "feedback": ({"zeropp_loco_param": {}}, (8, 4)),
    "stage 2": ({"stage": 2}, (8, 4)),
    "hpz": ({"zero_hpz_partition_size": 2}, (8, 4)),
    "persistent": ({"persist": 10**6}, (8, 4)),
}


TELLING = [("default", "1x4"), ("both 4", "4x1"), ("feedback", "2x2")]


@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(*row, marks=() if row in TELLING else pytest.mark.campaign) for row in product(QUANTIZED, SHAPES)],
)
def test_gradients_lie_within_the_codecs_bound(name: str, shape: str) -> None:
    """The bound is half a quantization step per message.

    The slope ``<gradient, mean> / <mean, mean>`` shows a wrong factor.
    """
    world, local = SHAPES[shape]
    settings, bits = QUANTIZED[name]
    if name == "hpz" and local != 2:
        settings = {"zero_hpz_partition_size": world}
    for found, plain in run_ranks(world, gradients_of, {**GRADIENTS, **settings}, local_world_size=local):
        for key, value in found.items():
            mean = torch.stack([each[key] for each in plain]).mean(0)
            limit = bound(plain, key, local, bits) + 1e-6 * float(mean.abs().max()) + 1e-7
            assert float((value - mean).abs().max()) <= limit, key
            slope = float((value * mean).sum() / mean.square().sum())
            assert abs(slope - 1) < (0.1 if 4 in bits else 0.01), f"{key} is off by a factor {slope}"


ROTATED: list[dict[str, object]] = [
    {},
    {"gradient_bits": {"local": 4, "cross": 8}},
    {"stage": 0},
    {"mics_shard_size": 2},
    {"gradient_accumulation_steps": 2},
]


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", ROTATED, ids=str)
def test_rotated_gradients_and_those_with_replicas_are_the_mean(settings: dict[str, object]) -> None:
    """The relative error is below 0.2 for each parameter."""
    for found, plain in run_ranks(4, gradients_of, {**GRADIENTS, "hadamard": True, **settings}, local_world_size=2):
        for key, value in found.items():
            mean = torch.stack([each[key] for each in plain]).mean(0)
            error = float((value - mean).norm() / mean.norm())
            assert error < 0.2, f"{key}: {error}"


class Spiky(nn.Module):
    """A model whose gradient is its input, in which the test makes every 32nd element far larger."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))

    def forward(self, slopes: Tensor) -> Tensor:
        return (self.weight * slopes).sum()


def error_beside_spikes(rotate: bool) -> tuple[float, set[str]]:
    """Return the mean square error of the elements beside large ones, and the codecs used."""
    spikes = torch.arange(4096) % 32 == 5
    each = [torch.randn(4096, generator=torch.Generator().manual_seed(rank)) + 20 * spikes for rank in range(4)]
    config = make_config(**GRADIENTS, hadamard=rotate, gradient_bits={"local": 4, "cross": 4})
    model = Spiky()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, config)
    model(each[dist.get_rank()]).backward()
    optimizer.step()
    error = -zeropp.full_state(model)["weight"] - torch.stack(each).mean(0)
    used = {row.codec for row in zeropp.comm_report(model).rows if row.kind == "reduce"}
    return float(error[~spikes].square().mean()), used


def test_rotation_preserves_small_elements_beside_large_ones() -> None:
    """Without rotation, a large element sets the scale of its group, and small elements are rounded away."""
    plain = run_ranks(4, error_beside_spikes, False, local_world_size=2)
    for (error, used), (without, _) in zip(
        run_ranks(4, error_beside_spikes, True, local_world_size=2), plain, strict=True
    ):
        assert used == {"hadamard(int4)"}
        assert error < 0.3 * without


def norms(settings: dict[str, object], scale: float) -> list[tuple[float, float]]:
    """Train two steps with losses scaled by ``scale`` and gradients unscaled again.

    Returns:
        For each step, the norm that the optimizer reports and the norm of the gradient that SGD applied.
    """
    model, optimizer = wrapped(make_config(**GRADIENTS, **settings), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    found = []
    for step in range(2):
        before = zeropp.full_state(model)
        optimizer.zero_grad()
        scaler.scale(model(tokens(step, dist.get_rank()))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = [before[name] - value for name, value in zeropp.full_state(model).items()]
        found.append((optimizer.grad_norm, float(torch.cat([each.flatten() for each in moved]).norm())))
    return found


@pytest.mark.every(16)
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize(
    "settings",
    # With one rank per node there is one hop.
    [{}, {"local_world_size": 1}, {"mics_shard_size": 2}, {"stage": 1, "gradient_bits": {"local": 4, "cross": 4}}],
    ids=str,
)
def test_norms_are_those_of_parameters_alone(settings: dict[str, object], scale: float) -> None:
    """Rotated codes leave errors in the padding behind a parameter.

    Unscaling does not change the padding, so the norm must leave it out.
    """
    for found in run_ranks(4, norms, {"hadamard": True, **settings}, scale, local_world_size=2):
        for reported, applied in found:
            assert reported == pytest.approx(applied, rel=1e-4)


# Memory of quantization.


def owned(settings: dict[str, object]) -> tuple[dict[str, int], dict[str, int]]:
    """Return this rank's bytes by term after two steps, and the bytes that ``zeropp.plan.memory`` predicts."""
    config = make_config(**settings)
    plan = zeropp.plan.memory(Model(), config, dist.get_world_size(), 2)
    model, optimizer = wrapped(config, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(tokens(step, dist.get_rank())).backward()
        optimizer.step()
    optimizer.engine.wait_for_refresh()
    optimizer.engine.release_prefetched()
    # Gradients stay until zero_grad().
    return owned_bytes(optimizer), {**plan.terms, "gradients": plan.gradients}


OWNED: list[dict[str, object]] = [
    {},
    {"zeropp_loco_param": {}},
    {"zeropp_loco_param": {}, "feedback": "both"},
    {"zero_hpz_partition_size": 2, "secondary": "codes"},
    {"zeropp_loco_param": {}, "stage": 0},
    {"zeropp_loco_param": {}, "mics_shard_size": 2, "persist": 100},
    {"zeropp_loco_param": {}, "defer_cross_reduction": True, "bf16": {"enabled": True}},
]


@pytest.mark.every(5)
@pytest.mark.parametrize("settings", OWNED, ids=str)
def test_owned_bytes_equal_the_plan(settings: dict[str, object]) -> None:
    for found, planned in run_ranks(4, owned, {**WEIGHTS, **GRADIENTS, **settings}, local_world_size=2):
        assert {**planned, "gathered": 0, "held_gradients": 0} == found


# Bytes.


Sent = dict[tuple[str, str, str], tuple[int, float]]  # (unit, kind, hop) -> (calls, bytes per call)


def one_step(settings: dict[str, object]) -> tuple[Sent, dict[str, int]]:
    """Return this rank's traffic in the third step, and the elements of each unit."""
    model, optimizer = wrapped(make_config(reuse=0, **settings), lr=0.1)
    ledger = optimizer.engine.comm.ledger
    for step in range(3):
        optimizer.engine.wait_for_refresh()
        dist.barrier()
        ledger.reset()
        optimizer.zero_grad()
        model(tokens(step, dist.get_rank())).backward()
        optimizer.step()
    optimizer.engine.wait_for_refresh()
    sent = {(r.unit, r.kind, r.hop): (r.calls, r.bytes / r.calls) for r in ledger.rows if r.kind != "control"}
    return sent, {unit.name: unit.numel for unit in optimizer.engine.units}


@pytest.mark.parametrize("placed", [{}, {"zero_hpz_partition_size": 2, "secondary": "codes"}], ids=str)
def test_bytes_are_those_of_the_codes(placed: dict[str, object]) -> None:
    """With two nodes of two ranks, gathers and intra-node reductions send 8-bit codes, inter-node ones 4-bit codes."""
    results = run_ranks(4, one_step, {**WEIGHTS, **GRADIENTS, **placed}, local_world_size=2)
    for sent, numels in results:
        wanted: Sent = {}
        for unit, numel in numels.items():
            message = kernels.message_layout(numel // 4, 8).nbytes
            # One gather each in forward and backward, and more if a unit is used at several places, because reuse is 0.
            times, _ = sent[unit, "gather", "2->1"]
            assert times >= 2
            wanted[unit, "refresh" if placed else "gather", "4->2"] = (1 if placed else times, message)
            wanted[unit, "gather", "2->1"] = (times, 2 * message)
            wanted[unit, "reduce", "1->2"] = (1, kernels.message_layout(numel // 2, 8).nbytes)
            wanted[unit, "reduce", "2->4"] = (1, kernels.message_layout(numel // 4, 4).nbytes)
        assert sent == wanted


# Gradients that are not finite.


def carried(optimizer: Any, before: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the first hop's stored error of the group with ``head.bias[299]``: before and now.

    Args:
        optimizer: optimizer of the model.
        before: copies of all error-feedback states, in the order of the trainable buffers.
    """
    position = 0
    for buffer in optimizer.engine.trainable_buffers:
        feedback = buffer.gradient.feedbacks[0]
        if "head.bias" in buffer.names:
            slot = buffer.layout.slots[buffer.names.index("head.bias")]
            count, groups = feedback.scales.shape
            size = buffer.layout.numel // count // groups
            message, group = divmod((slot.offset + 299) // size, groups)
            there = slice(group * size, (group + 1) * size)
            was, now = (each.view(count, -1)[message, there] for each in (before[position], feedback.state))
            return was, now
        position += len(buffer.gradient.feedbacks)
    raise AssertionError("no buffer has head.bias")


def spoilt(settings: dict[str, object], value: float) -> list[str]:
    """Train three steps, of which the second has a gradient that is not finite on the last rank.

    Args:
        settings: keys for ``make_config``.
        value: Inf or NaN.

    Returns:
        Descriptions of failures on this rank.
    """
    model, optimizer = wrapped(make_config(**settings), 0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []

    def spoil(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.tensor([299]), value) if rank == world - 1 else gradient

    def train(step: int, *, spoils: bool) -> None:
        optimizer.zero_grad()
        loss = model(tokens(step, rank))
        handle = model.head.bias.register_hook(spoil if spoils else lambda gradient: gradient)
        loss.backward()
        handle.remove()
        optimizer.step()

    train(0, spoils=False)
    weights = zeropp.full_state(model)
    states = [f.state.clone() for g in optimizer.engine.gradients for f in g.feedbacks]
    train(1, spoils=True)
    if not optimizer.step_was_skipped:
        wrong.append("the step was taken")
    wrong += [f"{name} changed" for name, v in zeropp.full_state(model).items() if not torch.equal(v, weights[name])]
    if settings.get("feedback") == "both" and rank == world - 1 and not torch.equal(*carried(optimizer, states)):
        wrong.append("errors of the block that is not finite have changed")
    if not all(f.scales.isfinite().all() for g in optimizer.engine.gradients for f in g.feedbacks):
        wrong.append("errors are not finite")
    after = [f.state for g in optimizer.engine.gradients for f in g.feedbacks]
    if states and all(map(torch.equal, states, after)):
        wrong.append("nothing was carried over from the good blocks")
    train(2, spoils=False)
    if optimizer.step_was_skipped:
        wrong.append("the step after was skipped")
    return wrong + [f"{name} is not finite" for name, v in zeropp.full_state(model).items() if not v.isfinite().all()]


@pytest.mark.every(6)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"zeropp_loco_param": {}},
        {"zeropp_loco_param": {}, "feedback": "both", "hadamard": True},
        {"zeropp_loco_param": {}, "mics_shard_size": 2},
        {"zeropp_loco_param": {}, "defer_cross_reduction": True, "bf16": {"enabled": True}},
    ],
    ids=str,
)
def test_gradients_that_are_not_finite_are_skipped_everywhere(settings: dict[str, object], value: float) -> None:
    """All ranks skip the step, weights do not change, and stored errors stay finite."""
    results = run_ranks(4, spoilt, {**WEIGHTS, **GRADIENTS, **settings}, value, local_world_size=2)
    assert results == [[]] * 4
