"""``ZeroOptimizer(..., device=...)`` with values on rank 0 only: ranks on the meta device train as if they had them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.all_parameter_kinds import CODED, Mixed
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from tests.support.staged_worlds import over
from tests.support.tensor_memory import storages
from zeropp.params.flat_buffer import FlatBuffer

KEPT: list[object] = []  # weak references to parameters and buffers, which must exist as long as the parameters


class Scaled(nn.Module):
    """A model with parameters of several kinds, a tied one, integers, and a non-persistent buffer of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = Mixed()
        self.mixed.seen += 1.5
        self.register_buffer("times", torch.rand(24), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("times", self.times, persistent=False)
        # Elements that overlap in memory: no copy of such a parameter has its strides.
        self.wide = nn.Parameter(torch.rand(24, 1).expand(24, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.mixed(tokens) * self.mixed.seen.sum() + self.mixed.codes.sum()
        return out + (self.again.times @ self.wide.float()).square().sum()


def build(*, meta: bool) -> Scaled:
    torch.manual_seed(7 + dist.get_rank())  # rank 0's values are broadcast, so the other ranks' values must not matter
    with torch.device("meta" if meta else "cpu"):
        model = Scaled()
    if not meta:
        with torch.no_grad():
            model.mixed.codes += 3
    return model


def train(model: nn.Module, settings: dict[str, object], device: str | None) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model, make_config(**settings), device=device
    )
    losses = []
    for step in range(2):
        loss = model((torch.arange(4) + 4 * step + 12 * dist.get_rank()) % 37).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {**zeropp.full_state(model), **dict(model.named_buffers())}
    optimizer.close()
    return losses, state


PLACED: dict[str, dict[str, object]] = {
    "bf16, small ones persistent": {"bf16": {"enabled": True}, "persist": 100},
    "stage 3": {},
    "stage 1": {"stage": 1},
    "stage 0": {"stage": 0},
    "hpZ, coded both ways": {**CODED, "zero_hpz_partition_size": 2, "zeropp_loco_param": {}, "feedback": "both"},
    "frozen codes": {"zero_quantized_nontrainable_weights": True},
}


def differences(settings: dict[str, object]) -> list[str]:
    """Return differences between a model with values on rank 0 only and a model with values on every rank."""
    wanted_losses, wanted = train(build(meta=False), settings, None)
    model = build(meta=dist.get_rank() > 0)
    before = dict(model.named_parameters())
    losses, state = train(model, settings, "cpu")
    wrong = [f"losses {losses}, wanted {wanted_losses}"] if losses != wanted_losses else []
    wrong += [f"{name} is another object" for name, p in model.named_parameters() if p is not before[name]]
    wrong += [f"{name} differs" for name in wanted if not torch.equal(state[name], wanted[name])]
    return wrong + [f"{name} is missing" for name in wanted.keys() ^ state.keys()]


@pytest.mark.every(5)
@pytest.mark.parametrize("name", PLACED)
def test_ranks_without_values_train_alike(name: str) -> None:
    for wrong in run_ranks(2, differences, PLACED[name]):
        assert wrong == []


@pytest.mark.fast
def test_in_nodes_of_two() -> None:
    for wrong in run_ranks(4, differences, PLACED["hpZ, coded both ways"], local_world_size=2):
        assert wrong == []


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 3", "hpZ, coded both ways"])
def test_over_a_backend_of_one_device(name: str) -> None:
    """Ranks without values train alike over the staged backend, which has collectives but no sends or receives."""
    for wrong in run_ranks(2, over, differences, PLACED[name], init=False):
        assert wrong == []


def recurrent() -> list[str]:
    """Wrap an LSTM, which keeps weak references to its weights, with values on every rank and on rank 0 only.

    Returns:
        Names of weights that differ. The weak references must refer to the same parameters afterwards.
    """
    found: list[dict[str, Tensor]] = []
    for meta in (False, dist.get_rank() > 0):
        torch.manual_seed(1)
        with torch.device("meta" if meta else "cpu"):
            model = nn.LSTM(6, 6, 2)
        optimizer = zeropp.ZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(), device="cpu"
        )
        for step in range(2):
            model(torch.full((4, 2, 6), step + 1.0))[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(zeropp.full_state(model))
        assert all(ref() is weight for ref, weight in zip(model._flat_weight_refs, model.parameters(), strict=True))
        optimizer.close()
    return [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


def test_a_recurrent_layer_without_values() -> None:
    assert run_ranks(2, recurrent) == [[], []]


def stateful(kind: str) -> str:
    """Wrap an optimizer with states or a tensor setting, on the meta device on rank 1, and return the error.

    Args:
        kind: "state" (states on every rank), "setting" (a tensor as learning rate), or "some" (states on rank 0 only).
    """
    model = nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind == "setting":
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device=model.weight.device)
    if kind == "state" or (kind == "some" and dist.get_rank() == 0):
        for parameter in model.parameters():
            zeros = torch.zeros_like(parameter, requires_grad=False)
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    try:
        zeropp.ZeroOptimizer(optimizer, model, make_config(), device="cpu")
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "kind, said",
    [
        ("state", "state of parameter 0 of group 0 is on the meta device and has no values|failed on rank 1"),
        ("setting", "lr of group 0 is on the meta device and has no value|failed on rank 1"),
        ("some", r"ranks 0 and 1 bring different .*states of \['weight', 'bias'\]"),
    ],
)
def test_an_optimizer_without_values_is_refused(kind: str, said: str) -> None:
    for found in run_ranks(2, stateful, kind):
        assert re.search(said, found), found


def peak() -> tuple[int, int, int]:
    """Measure the memory of wrapping.

    Returns:
        Largest number of bytes alive during wrapping, beyond those before; bytes of a rank's share by
        zeropp.plan.memory; and bytes of one unit.
    """
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    config = make_config()
    plan = zeropp.plan.memory(model, config, dist.get_world_size())
    adopt, before, found = FlatBuffer.shard_from, sum(storages().values()), [0]

    def watched(buffer: FlatBuffer, fill: Callable[[Tensor], None]) -> None:
        def filled(whole: Tensor) -> None:
            fill(whole)
            found.append(sum(storages().values()) - before)

        adopt(buffer, filled)
        found.append(sum(storages().values()) - before)

    with mock.patch.object(FlatBuffer, "shard_from", watched):
        optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config, device="cpu")
    optimizer.close()
    return max(found), sum(plan.terms.values()), 4 * 256 * 257


def test_no_more_than_a_share_and_one_unit() -> None:
    first, *others = run_ranks(4, peak)
    assert first[0] <= first[1], f"rank 0, whose model goes while its share comes: {first}"
    for most, share, unit in others:
        # The last unit is whole while the shards of all other units exist. 4096 bytes are for padding and for the NaN
        # element behind released parameters.
        assert share <= most <= share + unit + 4096, f"{most} bytes; share {share}, unit {unit}"


class Keeping(nn.Module):
    """A module with a tensor attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = torch.ones(3)


def nothing_anywhere() -> tuple[nn.Module, object]:
    return nn.Linear(3, 3, device="meta"), "cpu"


def no_device() -> tuple[nn.Module, object]:
    return nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu"), None


def no_such_device() -> tuple[nn.Module, object]:
    return nn.Linear(3, 3), "gpu"


def meta_device() -> tuple[nn.Module, object]:
    return nn.Linear(3, 3), "meta"


def two_devices() -> tuple[nn.Module, object]:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta")), None


def no_buffer() -> tuple[nn.Module, object]:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        return Keeping(), "cpu"


def buffer_without_values() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 3)
    model.register_buffer("seen", torch.ones(3, device="meta"))
    return model, "cpu"


def another_layout() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 5, device="meta" if dist.get_rank() else "cpu")
    if not dist.get_rank():  # as load_state_dict(assign=True) leaves a weight
        model.weight = nn.Parameter(torch.rand(3, 5).t())
    return model, "cpu"


def buffer_known_weakly() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")
    model.register_buffer("seen", torch.ones(3, device=model.weight.device))
    KEPT.append(weakref.ref(model.seen))
    return model, "cpu"


def in_a_list() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")
    model.scales = [{"first": torch.ones(3, device=model.weight.device)}]
    return model, "cpu"


def computed() -> tuple[nn.Module, object]:
    return nn.utils.weight_norm(nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")), "cpu"


def hooked() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model, "cpu"


def with_a_gradient() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")
    model.weight.grad = torch.ones_like(model.weight)
    return model, "cpu"


class Slotted(nn.Parameter):
    __slots__ = ("more",)


def with_slots() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")
    model.weight = Slotted(model.weight.data)
    model.weight.more = 1
    return model, "cpu"


def known_weakly() -> tuple[nn.Module, object]:
    model = nn.Linear(3, 3, device="meta" if dist.get_rank() else "cpu")
    KEPT.append(weakref.ref(model.weight))
    return model, "cpu"


REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "nothing anywhere": (
        nothing_anywhere,
        r"parameter 'weight' of the first rank is on the meta device; .* it needs them",
    ),
    "no device": (no_device, r"parameter 'weight' is on the meta device and has no values\. .*device="),
    "no such device": (no_such_device, r"device is 'gpu', which is no device here .*; give one such as torch\.device"),
    "the meta device": (meta_device, r'device is "meta", where nothing can be trained'),
    "two devices": (two_devices, r"parameter '1\.weight' is on the meta device and has no values"),
    "no buffer": (no_buffer, r"module '' keeps a tensor in 'scale' on the meta device that is no buffer"),
    "a tensor in a list": (in_a_list, r"module '' keeps a tensor in 'scales' on the meta device that is no buffer"),
    "weight_norm": (computed, r"module '' keeps 'weight', computed from parameters on the meta device"),
    "hooks": (hooked, r"parameter 'weight' is on the meta device and has hooks"),
    "a gradient": (with_a_gradient, r"parameter 'weight' has a gradient, which would stay where the parameter was"),
    "slots": (
        with_slots,
        r"shape \(3, 3\) on the meta device cannot be given values|placing the model failed on rank 1",
    ),
    "a buffer without values": (buffer_without_values, r"buffer 'seen' of the first rank is on the meta device"),
    "another layout": (another_layout, r"bring different models.*weight \(5, 3\).*strides"),
    "a buffer known weakly": (
        buffer_known_weakly,
        r"cannot be given values .*has weakref associated|placing the model failed on rank 1",
    ),
    "known weakly": (known_weakly, r"parameter 'weight' is on the meta device, and something refers to it weakly"),
}


def refusal(name: str) -> str:
    model, device = REFUSED[name][0]()
    try:
        zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(), device=device)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.every(3)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(name: str) -> None:
    for said in run_ranks(2, refusal, name):
        assert re.search(REFUSED[name][1], said), said


def placed_state(offload: bool) -> dict[str, int]:
    """Return the bytes of each value of ``full_state(rank0_only=True)``; an empty dict on rank 1.

    Args:
        offload: value of ``cpu_offload``.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    state = zeropp.full_state(model, rank0_only=True, cpu_offload=offload)
    # With cpu_offload, values are on the CPU, which is the engine's device here, too.
    assert all(value.device == optimizer.engine.device for value in state.values())
    for value in state.values():
        value.zero_()
    whole = zeropp.full_state(model, cpu_offload=offload)
    assert whole["0.weight"].any(), "full_state returned a view of the weights"
    return {name: value.nbytes for name, value in state.items()}


@pytest.mark.every(2)
@pytest.mark.parametrize("offload", [True, False])
def test_full_state_on_either_device(offload: bool) -> None:
    first, second = run_ranks(2, placed_state, offload)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).state_dict()
    assert (first, second) == ({name: value.nbytes for name, value in plain.items()}, {})
