"""``zeropp.host_memory_limit``: every rank raises MemoryLimitError, with the bytes needed and the bytes allowed.

``ZeroOptimizer`` raises before it creates a file or changes the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.support.all_parameter_kinds import Mixed
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from tests.support.zero_init_model import limits
from zeropp import zero


def config_of(path: str, limit: int | None = None) -> dict[str, Any]:
    files = {"device": "nvme", "nvme_path": path}
    more = {} if limit is None else {"host_memory_limit": limit}
    return make_config(offload_optimizer=files, offload_param=files, aio={"block_size": 1024}, **more)


def needs(path: str) -> int:
    """Return the bytes of host memory that all ranks of a node need together when CPUs train."""
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    return local * zeropp.plan.memory(Mixed(), config_of(path), world, local, device="cpu").host_total


def wrapped(path: str, below: int) -> tuple[str, bool, list[str]]:
    """Wrap a model with a host memory limit that is ``below`` bytes lower than the planned need.

    Returns:
        The error ("" for none), True if the error left all parameters unchanged, and the names of files in ``path``.
    """
    model = Mixed()
    before = {name: (type(p), p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    config = config_of(path, needs(path) - below)
    try:
        zeropp.ZeroOptimizer(optimizer, model, config).close()
    except (RuntimeError, ValueError) as error:
        now = dict(model.named_parameters())
        same = all(type(now[name]) is kind and torch.equal(now[name], value) for name, (kind, value) in before.items())
        return f"{type(error).__name__}: {error}", same, os.listdir(path)
    return "", False, os.listdir(path)


@pytest.mark.every(5)
@pytest.mark.parametrize(("world", "local"), [(2, 1), (1, 1), (2, 2)])
def test_the_optimizer_refuses_models_that_exceed_the_limit(world: int, local: int, tmp_path: Path) -> None:
    for text, unchanged, left in run_ranks(world, wrapped, str(tmp_path), 1, local_world_size=local):
        assert text.startswith("MemoryLimitError: ") and "offload_param.max_in_cpu" in text
        assert unchanged and left == []
    for text, _, _ in run_ranks(world, wrapped, str(tmp_path), 0, local_world_size=local):
        assert text == ""


def states(kind: str) -> str:
    """Return the error of wrapping with SGD, under a limit that is exactly the need without optimizer states."""
    model = nn.Sequential(nn.Linear(64, 64))
    momentum = 0.9 if kind == "momentum" else 0.0
    plan = zeropp.plan.memory(model, make_config(), 1, device="cpu", states=0)
    config = make_config(host_memory_limit=plan.host_total)
    try:
        zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), model, config)
    except ValueError as error:
        return str(error)
    return ""


def test_states_are_those_of_the_optimizer_that_is_given() -> None:
    assert run_ranks(1, states, "plain") == [""]
    (text,) = run_ranks(1, states, "momentum")
    assert "optimizer states 17,408 bytes" in text, "64 x 64 weights and 64 biases, in 17 blocks of 256"


def built(how: str, short: int) -> tuple[str, int]:
    """Build three linear layers with a limit that is ``short`` bytes below the size of all pieces on a node.

    Args:
        how: "inside" builds the layers inside ``zero.Init``. "given" passes finished layers to ``zero.Init``.
            "materialized" initializes layers on the meta device with ``zero.materialize``.
        short: number of bytes by which the limit is too low.

    Returns:
        The error ("" for none), and the number of layers built or initialized so far.
    """
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    most = local * 4 * (3 * 40 * 40 // world) - short
    config = make_config(offload_param={"device": "cpu"}, host_memory_limit=most)
    layers: list[nn.Module] = []
    try:
        if how == "inside":
            with limits(0, 0), zero.Init(config_dict_or_path=config):
                with torch.device("meta"):
                    nn.Linear(1000, 1000)  # not counted: a layer on the meta device takes no memory
                for _ in range(3):
                    layers.append(nn.Linear(40, 40, bias=False))
        elif how == "given":
            layers += [nn.Linear(40, 40, bias=False) for _ in range(3)]
            with limits(0, 0):
                zero.Init(nn.Sequential(*layers), config_dict_or_path=config)
        else:
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(3)))

            def initialize(module: nn.Module) -> None:
                layers.append(module)
                module.reset_parameters()  # type: ignore[operator]

            zeropp.zero.materialize(model, initialize, config=config)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", len(layers)
    return "", len(layers)


@pytest.mark.parametrize(("how", "layers"), [("inside", 2), ("given", 3), ("materialized", 0)])
def test_a_build_in_pieces_refuses_models_that_exceed_the_limit(how: str, layers: int) -> None:
    """Every rank raises as soon as the pieces of the parameters built so far take more than the limit.

    A finished model is checked before ``zero.Init`` or ``materialize`` changes it.
    """
    for local in (1, 2):
        for text, count in run_ranks(2, built, how, 1, local_world_size=local):
            assert text.startswith("MemoryLimitError: ") and "3 parameters" in text and "4,800 elements" in text
            assert f"{local * 9600:,} bytes" in text and f"{local * 9600 - 1:,} bytes" in text
            assert count == layers
        assert run_ranks(2, built, how, 0, local_world_size=local) == [("", 3)] * 2
