"""Gradients that a step on the host reads: code that discards them waits, and a refused step is not counted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.disk_faults import offload_threads
from tests.support.offload_pairs import host_apart
from tests.support.rank_pool import run_ranks, some, spread
from tests.support.small_models import MODELS
from zeropp.optimizer.host_step import HostStep

KIND = MODELS["gpt"]
Forget = Callable[[nn.Module, zeropp.ZeroOptimizer], None]


def by_parameter(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def to_zero(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    optimizer.inner.zero_grad(set_to_none=False)


def by_the_wrapper(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def make(offload: dict[str, Any] | None, **options: Any) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    torch.manual_seed(3)
    model = KIND.build().float()
    half = len(list(model.parameters())) // 2
    groups = [{"params": list(model.parameters())[:half]}, {"params": list(model.parameters())[half:]}]
    inner = torch.optim.AdamW(groups, lr=3e-3, fused=True, **options)
    settings = {} if offload is None else {"offload_optimizer": offload, "aio": {"block_size": 1024}}
    return model, zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_clipping=0.3))


def step(model: nn.Module, optimizer: zeropp.ZeroOptimizer, number: int) -> None:
    optimizer.backward(KIND.loss(model, KIND.batch(torch.Generator().manual_seed(number))))
    optimizer.step()


def train(offload: dict[str, Any] | None, forget: Forget) -> dict[str, Tensor]:
    """Return the whole weights after three steps that the host finishes late."""
    model, optimizer = make(offload)
    plain = HostStep._step

    def late(*arguments: Any) -> None:
        time.sleep(0.01)
        plain(*arguments)

    with mock.patch.object(HostStep, "_step", late):
        for number in range(3):
            step(model, optimizer, number)
            forget(model, optimizer)
        weights = zeropp.full_state(model)
    optimizer.close()
    return weights


@cache
def trained_in_memory(forget: Forget) -> list[dict[str, Tensor]]:
    return run_ranks(2, train, None, forget)


@pytest.mark.parametrize(("device", "forget"), spread(["cpu", "nvme"], [by_parameter, to_zero, by_the_wrapper], 3))
def test_forgetting_waits_for_the_step(device: str, forget: Forget, tmp_path: Path) -> None:
    block = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    for found, expected in zip(run_ranks(2, train, block, forget), trained_in_memory(forget), strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def refused(ratio: float) -> tuple[list[float], bool]:
    """Return the step counts after a refused fourth step, and True if the refused step changed no weight."""
    model, optimizer = make({"device": "cpu", "ratio": ratio})
    for number in range(3):
        step(model, optimizer, number)
        optimizer.zero_grad()
    before = zeropp.full_state(model)
    # The setting is in the last group. When the step is refused, earlier groups must not have been counted or stepped.
    optimizer.param_groups[1]["amsgrad"] = True
    with pytest.raises(RuntimeError, match="no max_exp_avg_sq: amsgrad was set"):
        step(model, optimizer, 3)
    counts = {float(state["step"]) for state in optimizer.inner.state.values()}
    after = zeropp.full_state(model)
    optimizer.close()
    return sorted(counts), all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("ratio", some([0.5, 1.0], 2))
def test_a_step_that_is_refused_counts_nothing(ratio: float) -> None:
    assert run_ranks(2, refused, ratio) == [([3.0], True)] * 2


def no_room(folder: str) -> str:
    """Return the error on this rank when rank 1's disk is full while a step creates states that were not reserved."""
    import torch.distributed as dist

    torch.manual_seed(3)
    model = KIND.build().float()
    inner = torch.optim.SGD(model.parameters(), lr=3e-3, fused=True)
    block = {"device": "nvme", "nvme_path": folder}
    config = make_config(offload_optimizer=block, aio={"block_size": 1024})
    optimizer = zeropp.ZeroOptimizer(inner, model, config)
    # Wrapping reserved no space for momentum, because SGD had none.
    optimizer.param_groups[0]["momentum"] = 0.9
    plain, full = os.posix_fallocate, dist.get_rank() == 1

    def fallocate(descriptor: int, offset: int, nbytes: int) -> None:
        if full:
            raise OSError(28, "No space left on device")
        plain(descriptor, offset, nbytes)

    with mock.patch.object(os, "posix_fallocate", fallocate), pytest.raises(RuntimeError) as caught:
        for number in range(2):
            step(model, optimizer, number)
            optimizer.zero_grad()
    return str(caught.value)


def test_every_rank_hears_of_a_disk_that_has_no_room_for_more_states(tmp_path: Path) -> None:
    for heard in run_ranks(2, no_room, str(tmp_path)):
        assert "No space left on device" in heard and "making room for optimizer states" in heard, heard


def threads_after_close(folder: str) -> list[str]:
    import threading

    before = {thread.ident for thread in threading.enumerate()}
    model, optimizer = make({"device": "nvme", "nvme_path": folder})
    step(model, optimizer, 0)
    optimizer.close()
    found = [thread.name for thread in threading.enumerate() if thread.ident not in before]
    assert not offload_threads() and model is not None
    return [name for name in found if name.startswith("zeropp")]


def test_close_ends_the_threads(tmp_path: Path) -> None:
    assert run_ranks(1, threads_after_close, str(tmp_path)) == [[]]


def kept(offload: dict[str, Any] | None, lazy: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train without ``zero_grad()``, with a second ``step()`` after each; return two lists of norms and the weights.

    The first list has the norm at each second step. The second list has the norm from ``grad_norms()`` before that
    step.
    """
    torch.manual_seed(3)
    model = KIND.build().float()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    settings = {} if offload is None else {"offload_optimizer": offload, "aio": {"block_size": 1024}}
    optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings, gradient_clipping=0.3, lazy_step=lazy))
    norms, parts = [], []
    for number in range(2):
        step(model, optimizer, number)
        parts.append(sum(value**2 for value in optimizer.grad_norms().values()) ** 0.5)
        optimizer.step()
        norms.append(optimizer.grad_norm or 0.0)
    weights = zeropp.full_state(model)
    optimizer.close()
    return norms, parts, weights


@pytest.mark.every(12)
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_gradients_that_are_kept_are_the_clipped_ones(device: str, ratio: float, lazy: bool, tmp_path: Path) -> None:
    block = {"device": device, "ratio": ratio, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    plain = run_ranks(2, kept, None, True)
    for found, expected in zip(run_ranks(2, kept_apart, block, lazy), plain, strict=True):
        assert found[0] == expected[0] and found[0][0] == pytest.approx(0.3, rel=1e-4)
        assert found[1] == pytest.approx(expected[1], rel=1e-6)
        assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())


def kept_apart(offload: dict[str, Any], lazy: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    with host_apart():
        return kept(offload, lazy)


def inner_states(slow: bool) -> list[Tensor]:
    """Return the moments from the wrapped optimizer's own ``state_dict()``, called right after a step.

    Args:
        slow: True to delay the step on the host by 20 ms.
    """
    model, optimizer = make({"device": "cpu"})
    plain = HostStep._step

    def late(*arguments: Any) -> None:
        time.sleep(0.02 * slow)
        plain(*arguments)

    with mock.patch.object(HostStep, "_step", late):
        step(model, optimizer, 0)
        found = [state["exp_avg"].clone() for state in optimizer.inner.state_dict()["state"].values()]
    optimizer.close()
    # After close(), state_dict() of the wrapped optimizer must neither wait nor raise.
    optimizer.inner.state_dict()
    return found


def test_the_wrapped_optimizer_s_own_state_dict_waits() -> None:
    (late,), (plain,) = run_ranks(1, inner_states, True), run_ranks(1, inner_states, False)
    assert plain
    assert all(torch.equal(one, other) and other.any() for one, other in zip(late, plain, strict=True))
