"""Settings and models that zeropp.fsdp2 refuses, on every rank and before any hook is installed.

Also ``remove()``, asynchronous ``unshard``, and a job of one rank.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.support.fsdp2_models import PLAIN, gradients, hooks, sharded
from tests.support.fsdp2_reference import Net, tokens
from tests.support.rank_pool import run_ranks
from zeropp import fsdp2
from zeropp.fsdp2.options import Options
from zeropp.fsdp2.shards import parameter_groups


def refused(case: str) -> str:
    """Return the error for one of ``CASES``.

    After the error, the ranks can still communicate, and FSDP2 has its own hooks (except after a second ``apply``).
    """
    make, settings = CASES[case]
    model = make()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        fsdp2.apply(model, **(settings() if callable(settings) else settings))
    check = torch.ones(1)
    dist.all_reduce(check)
    assert check.item() == dist.get_world_size()
    for module in model.modules():
        if isinstance(module, FSDPModule) and case != "twice":
            assert all(type(hook).__name__.startswith("Default") for hook in hooks(module)[:2])
    return str(raised.value)


class Mixed(Net):
    """A model with a frozen parameter of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed.bfloat16()


class Whole(Net):
    """A model with a parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(8, dtype=torch.int64), requires_grad=False)


def unmixed(cls: type[nn.Module]) -> Any:
    """Return a model sharded without a mixed-precision policy, so that each parameter is gathered in its own dtype."""
    model = cls()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def otherwise_frozen() -> nn.Module:
    """Return a model of which the last rank trains one parameter less."""
    model = Net()
    model.head.bias.requires_grad_(dist.get_rank() < 3)
    return fully_shard(model)


def replicated() -> nn.Module:
    """Return a model whose parameters are only replicated, by torch's ``replicate``."""
    return replicate(Net(), mesh=dist.init_device_mesh("cpu", (4,), mesh_dim_names=("replicas",)))


def applied() -> nn.Module:
    """Return a model on which ``fsdp2.apply`` has been called."""
    model = sharded()
    fsdp2.apply(model)
    return model


def extended() -> nn.Module:
    """Return a model with a parameter that has its own all-gather extension."""
    model = sharded()
    param = parameter_groups(model.blocks[0]._get_fsdp_state())[0].fsdp_params[0]
    param._sharded_local_tensor.fsdp_pre_all_gather = lambda *_: None
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "not sharded": (Net, {}),
    "twice": (applied, {}),
    "replicas": (replicated, {}),
    "dtypes": (lambda: unmixed(Mixed), {}),
    "integers": (lambda: unmixed(Whole), {}),
    "extension": (extended, {}),
    "uneven nodes": (sharded, {"local_world_size": 3}),
    "no nodes": (sharded, {"local_world_size": 0}),
    "weights": (sharded, {"weights": "int4"}),
    "bits": (sharded, {"gradient_bits": (8, 2)}),
    "one width": (sharded, {"gradient_bits": 8}),
    "secondary": (sharded, {"weights": None, "secondary": "codes"}),
    "nothing twice": (sharded, {"secondary": "codes"}),
    "feedback": (sharded, {"gradient_bits": None, "feedback": "cross"}),
    "feedback inside": (sharded, {"gradient_bits": (16, 4), "feedback": "both"}),
    "hadamard": (sharded, {"gradient_bits": (16, 16), "hadamard": True}),
    "beta": (sharded, {"feedback": "cross", "beta": 1.0}),
    "beta alone": (sharded, {"beta": 0.5}),
    "beta as text": (sharded, {"feedback": "cross", "beta": "0.9"}),
    "beta as a flag": (sharded, {"feedback": "cross", "beta": False}),
    "no timeout": (sharded, {"hang_timeout": None}),
    "timeout as text": (sharded, {"hang_timeout": "60"}),
    "timeout as a duration": (sharded, {"hang_timeout": timedelta(minutes=1)}),
    "timeout that is no number": (sharded, {"hang_timeout": float("nan")}),
    "larger nodes than the job": (sharded, {"local_world_size": 64}),
    "nodes as text": (sharded, {"local_world_size": "2"}),
    "bits as text": (sharded, {"gradient_bits": "84"}),
    "three widths": (sharded, {"gradient_bits": [8, 4, 4]}),
    "hops": (sharded, {"gather_hops": 3}),
    "timeout": (sharded, {"hang_timeout": 0.0}),
    "ranks disagree": (sharded, lambda: {"gradient_bits": (8, 8 if dist.get_rank() == 3 else 4)}),
    "ranks train other parameters": (otherwise_frozen, {}),
    "one rank": (sharded, lambda: {"feedback": "cross", "beta": 2.0 if dist.get_rank() == 1 else 0.8}),
}
SAID = {
    "not sharded": "no module of this Net has been sharded; call torch.distributed.fsdp.fully_shard",
    "twice": r"has a GatherComm already; expected FSDP2's DefaultAllGather.*remove\(\)",
    "replicas": r"replicates parameters and shards none, as replicate\(\) does",
    "dtypes": r"\(root\): parameters are gathered together in several dtypes.*'torch.bfloat16': \['fixed.weight'\]",
    "integers": "in several dtypes.*torch.int64",
    "extension": r"blocks.0: \['blocks.0.0.weight'\] bring their own all-gather extension",
    "uneven nodes": "every node must give the same number of ranks.*the argument local_world_size",
    "no nodes": "local_world_size is 0; expected ranks per node",
    "weights": "weights is 'int4'; expected 'int8' or None",
    "bits": r"gradient_bits is \(8, 2\); expected None or \(inside a node, between nodes\)",
    "one width": "gradient_bits is 8; expected",
    "secondary": "codes need weights='int8'",
    "nothing twice": "backward gathers nothing a second time; give fully_shard reshard_after_forward=",
    "feedback": "feedback='cross' compensates quantization errors, and gradient_bits=None does not quantize",
    "feedback inside": r"gradient_bits=\(16, 4\) does not quantize on every hop",
    "hadamard": "quantizes nothing",
    "beta": "beta is 1.0; expected a number, 0 <= beta < 1",
    "beta alone": "beta is 0.5 and feedback is None",
    "beta as text": "beta is '0.9'; expected a number, 0 <= beta < 1",
    "beta as a flag": "beta is False; expected a number",
    "no timeout": "hang_timeout is None; expected a number of seconds",
    "timeout as text": "hang_timeout is '60'; expected a number of seconds",
    "timeout as a duration": r"hang_timeout is datetime.timedelta\(seconds=60\); expected a number of seconds",
    "timeout that is no number": "hang_timeout is nan; expected",
    "larger nodes than the job": "local_world_size is 64; expected ranks per node, at most the 4 of this job",
    "nodes as text": "local_world_size is '2'; expected ranks per node",
    "bits as text": "gradient_bits is '84'; expected",
    "three widths": r"gradient_bits is \[8, 4, 4\]; expected",
    "hops": "gather_hops is 3; expected 1 or 2",
    "timeout": "hang_timeout is 0.0",
    "ranks disagree": "ranks 0 and 3 disagree",
    "ranks train other parameters": "ranks 0 and 3 disagree",
    "one rank": "beta is 2.0",
}


def refused_all() -> dict[str, str]:
    return {case: refused(case) for case in CASES}


def other_nodes() -> str:
    """Return the error of ``apply`` when the last rank's LOCAL_WORLD_SIZE differs from that of the other ranks."""
    if dist.get_rank() == 3:
        os.environ["LOCAL_WORLD_SIZE"] = "4"
    with pytest.raises((ValueError, RuntimeError)) as raised:
        fsdp2.apply(sharded())
    return str(raised.value)


def test_nodes_that_differ_between_ranks_are_refused_before_groups_are_made() -> None:
    """Creating process groups is collective, so ranks with different groups would wait for each other forever."""
    for said in run_ranks(4, other_nodes, local_world_size=2):
        assert "ranks 0 and 3 disagree" in said, said


def test_unsupported_settings_are_refused_on_every_rank() -> None:
    for said in run_ranks(4, refused_all, local_world_size=2):
        assert {case for case, text in said.items() if not re.search(SAID[case], text, re.DOTALL)} == set()


@pytest.mark.parametrize(
    "settings",
    [
        {"feedback": "cross", "gradient_bits": (16, 4)},
        {"feedback": "both", "gradient_bits": (8, 8), "beta": 0.0},
        {"hadamard": True, "gradient_bits": (16, 8)},
        {"hadamard": True, "gradient_bits": (4, 32)},
        {"beta": 0, "feedback": "cross", "gradient_bits": [8, 4], "hang_timeout": 60, "local_world_size": 4},
        {"secondary": "codes", "gather_hops": 1, "local_world_size": 1},
    ],
    ids=str,
)
def test_compatible_settings_are_accepted(settings: dict[str, Any]) -> None:
    defaults = {name: each.default for name, each in inspect.signature(fsdp2.apply).parameters.items()}
    del defaults["model"]
    Options(**{**defaults, **settings}).check(4)


def late_changes() -> list[str]:
    """Change a dtype after apply; remove the adapter of another model.

    A forward with the changed dtype raises an error. After ``remove()``, gradients are those of FSDP2, no bytes are
    counted, and no process group of the adapter exists.

    Returns:
        Names of wrong gradients, and other failures.
    """
    model = unmixed(Net)
    fsdp2.apply(model)
    model.fixed.bfloat16()
    with pytest.raises(RuntimeError, match=r"FSDP2 sends torch\.uint8, since its parameters have had several dtypes"):
        model(tokens(0, dist.get_rank()))
    model = sharded()
    groups = len(dist.distributed_c10d._world.pg_map)
    adapter = fsdp2.apply(model)
    model(tokens(0, dist.get_rank())).backward()
    before = adapter.ledger.total_bytes
    adapter.remove()
    assert len(dist.distributed_c10d._world.pg_map) == groups, "process groups outlive the adapter"
    model.zero_grad()
    model(tokens(0, dist.get_rank())).backward()
    usual = sharded()
    usual(tokens(0, dist.get_rank())).backward()
    one, two = gradients(model), gradients(usual)
    wrong = [name for name in two if not torch.equal(one[name], two[name])]
    if before == 0 or adapter.ledger.total_bytes != before:
        wrong.append("bytes after remove")
    fsdp2.apply(model, **PLAIN)
    model(tokens(0, dist.get_rank())).backward()
    return wrong


def test_late_changes_and_removal() -> None:
    assert run_ranks(4, late_changes, local_world_size=2) == [[]] * 4


def asynchronous() -> list[tuple[float, int]]:
    """Return (loss, bytes sent) with FSDP2's usual gathers, and with gathers started by ``unshard(async_op=True)``."""
    found = []
    for ahead in (False, True):
        model = sharded()
        adapter = fsdp2.apply(model)
        if ahead:
            handles = [block.unshard(async_op=True) for block in model.blocks]
            assert None not in handles
        loss = model(tokens(0, dist.get_rank()))
        loss.backward()
        found.append((loss.item(), adapter.ledger.total_bytes))
    return found


def test_gathers_that_are_started_ahead() -> None:
    for usual, ahead in run_ranks(4, asynchronous, local_world_size=2):
        assert usual == ahead


def lone() -> float:
    """Return the difference of one rank's loss from plain torch. The ledger must stay empty."""
    model = sharded()
    adapter = fsdp2.apply(model, feedback="both")
    loss = model(tokens(0, 0))
    loss.backward()
    assert adapter.ledger.rows == []
    return loss.item() - Net()(tokens(0, 0)).item()


def test_one_rank_sends_nothing() -> None:
    assert run_ranks(1, lone) == [0.0]
