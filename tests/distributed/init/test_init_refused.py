"""Every rank raises if ranks build different models in ``zero.Init``, fail, or wrap in another way than they built."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.rank_pool import run_ranks
from tests.support.zero_init_model import limits
from zeropp import zero
from zeropp.params import sharded_build


def other(kind: str) -> str:
    """Return the error of ranks that build different models, or of which one fails.

    Args:
        kind: difference: "shapes", "fails", "touches" (rank 0 uses a weight) or "more" (rank 0 adds a layer).
    """
    width = 40 + (kind == "shapes") * dist.get_rank()
    try:
        with limits(0, 0), zero.Init():
            model = nn.Sequential(nn.Linear(width, 40))
            if kind == "fails" and dist.get_rank() == 1:
                raise ArithmeticError("no more")
            if kind == "touches" and dist.get_rank() == 0:
                model[0].weight.sum()
            if kind == "more" and dist.get_rank() == 0:
                model.append(nn.Linear(40, 40))
    except (RuntimeError, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", ["shapes", "fails", "touches", "more"])
def test_ranks_that_differ(kind: str) -> None:
    errors = run_ranks(2, other, kind)
    if kind == "fails":
        assert errors[1] == "ArithmeticError: no more"
        assert "failed on rank 1: ArithmeticError: no more" in errors[0]
    else:
        text = (
            "ranks are at different calls: rank 0 is at"
            if kind == "touches"
            else "ranks 0 and 1 build different models"
        )
        assert all(text in error for error in errors), errors


def wrapped(kind: str) -> str:
    """Return the error of a wrong argument, or of wrapping a model in another way than it was built.

    Args:
        kind: name of the case.
    """
    group = dist.new_group([0, 1]) if dist.get_world_size() > 2 else None
    try:
        if kind == "both groups":
            zero.Init(data_parallel_group=dist.group.WORLD, sequence_data_parallel_group=dist.group.WORLD)
        elif kind == "nvme":
            zero.Init(remote_device="nvme")
        elif kind == "pinned":
            zero.Init(pin_memory=True)
        elif kind == "mics":
            zero.MiCS_Init()
        elif kind == "dtype":
            zero.Init(dtype=torch.int32)
        elif kind == "meta device":
            zero.Init(remote_device="meta")
        elif kind == "no module":
            zero.Init(5)  # type: ignore[arg-type]
        elif kind == "twice":
            with (init := zero.Init()), init:
                pass
        with zero.Init(zero_quantized_weights=kind == "qwZ"):
            model = nn.Sequential(nn.Linear(300, 300))
        if kind == "lent":
            with zero.GatheredParameters(model):
                zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        if group is not None and dist.get_rank() < 2:
            zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=group)
        elif group is None:
            zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("twice", "entered inside its own block"),
        ("lent", "inside GatheredParameters"),
        ("meta device", 'expected "cpu"'),
        ("no module", "expected a torch.nn.Module"),
        ("both groups", "takes the place"),
        ("nvme", "nothing says where"),
        ("pinned", 'give "cpu"'),
        ("mics", "mics_shard_size"),
        ("dtype", "torch.int32"),
        ("qwZ", "zero_quantized_weights True"),
    ],
)
def test_refused(kind: str, match: str) -> None:
    assert all(match in error for error in run_ranks(2, wrapped, kind))


def test_another_group_is_refused() -> None:
    errors = run_ranks(3, wrapped, "group")
    assert all("process_group has ranks [0, 1]" in error for error in errors[:2]), errors


def fails(kind: str) -> str:
    """Return the error of this rank after rank 1 alone fails.

    Args:
        kind: place of the failure: "argument", "end" (of the block), "loan" (inside GatheredParameters) or "calls"
            (another call).
    """
    last = dist.get_rank() == 1
    try:
        with limits(1 << 10, 200), contextlib.ExitStack() as stack:
            if kind == "argument":
                zero.Init(dtype=torch.int32 if last else None)
            with zero.Init():
                model = nn.Sequential(nn.Linear(30, 30))
                if kind == "end" and last:
                    # as if there were no memory for a message
                    stack.enter_context(
                        mock.patch.object(sharded_build, "dense_row", side_effect=ArithmeticError("no more"))
                    )
            with zero.GatheredParameters(model):
                if kind == "loan" and last:
                    raise ArithmeticError("no more")
            if kind == "calls" and last:
                zero.materialize(model)
            zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    except (RuntimeError, ValueError, ArithmeticError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        ("argument", "torch.int32", "preparing zero.Init failed on rank 1: ValueError: dtype is torch.int32"),
        ("end", "ArithmeticError: no more", "failed on rank 1: ArithmeticError: no more"),
        ("loan", "ArithmeticError: no more", "failed on rank 1: ArithmeticError: no more"),
        ("calls", "ranks are at different calls", "ranks are at different calls"),
    ],
)
def test_a_rank_that_fails_is_heard_of(kind: str, own: str, others: str) -> None:
    errors = run_ranks(2, fails, kind, timeout=60)
    assert own in errors[1] and others in errors[0], errors
