"""Calls after ``zeropp.fsdp2.apply``: fully_shard, hooks of the user's, and the ends of an adapter.

Two nodes of two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tests.support.fsdp2_models import gradients, hooks, sharded
from tests.support.fsdp2_reference import Net, tokens
from tests.support.rank_pool import run_ranks
from zeropp import fsdp2
from zeropp.fsdp2.shards import parameter_groups


def kinds(model: Any) -> list[tuple[str, str]]:
    """Types of the hooks of each unit."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [(type(gather).__name__, type(reduce).__name__) for gather, reduce, _ in map(hooks, units)]


DEFAULT = [("DefaultAllGather", "DefaultReduceScatter")] * 3


def cut(when: str, then: str) -> tuple[Any, Any]:
    """A model that is sharded in two parts, ``apply`` between them or behind; and the adapter."""
    model: Any = Net()
    fully_shard(model.blocks[0])
    if when == "a new module":
        fully_shard(model)
    if then == "between":
        adapter = fsdp2.apply(model)
    if when == "a new module":
        torch.manual_seed(1)
        model.head = fully_shard(torch.nn.Linear(37, 301))
    if when == "a block and the root":
        fully_shard(model.blocks[1])
    if when != "a new module":
        fully_shard(model)
    if then == "behind":
        adapter = fsdp2.apply(model)
    return model, adapter


def sharded_later(when: str) -> tuple[str, str, list[str]]:
    """What the first forward and the next one raise; gradients that differ when training goes on as it says."""
    model, adapter = cut(when, "between")
    batch = tokens(0, dist.get_rank())
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            model(batch).backward()
        said.append(str(raised.value))
        model.reset_iter_state()
    sent = adapter.ledger.total_bytes
    adapter.remove()
    fsdp2.apply(model)
    usual, _ = cut(when, "behind")
    for each in (model, usual):
        each(batch).backward()
    found, wanted = gradients(model), gradients(usual)
    wrong = [name for name, value in wanted.items() if not torch.equal(value, found[name])]
    return *said, wrong + (["bytes were sent before the error"] if sent else [])


@pytest.mark.every(5)
@pytest.mark.parametrize("when", ["the root", "a block and the root", "a new module"])
def test_what_is_sharded_after_apply_is_refused_at_first_use(when: str) -> None:
    names = {"a block and the root": "['(root)', 'blocks.1']", "a new module": "['head']"}.get(when, "['(root)']")
    for first, second, wrong in run_ranks(4, sharded_later, when, local_world_size=2):
        assert first == second and f"fully_shard was called on {names} after zeropp.fsdp2.apply" in first
        assert wrong == []


def a_part() -> list[str]:
    """Adapters on parts of a model; what is sharded elsewhere is FSDP2's."""
    model: Any = Net()
    for part in (*model.blocks, model):
        fully_shard(part)
    adapters = [fsdp2.apply(block) for block in model.blocks]
    model(tokens(0, dist.get_rank())).backward()
    return [row.unit for adapter in adapters for row in adapter.ledger.rows if row.kind == "reduce"]


def test_an_adapter_on_a_part_leaves_the_rest_to_fsdp2() -> None:
    assert run_ranks(4, a_part, local_world_size=2) == [["(root)"] * 4] * 4


class Gather(DefaultAllGather):
    """A hook of the user's."""


class Reduce(DefaultReduceScatter):
    """A hook of the user's."""


def hooks_of_others() -> list[str]:
    """Hooks that remove has taken, of the user's, or left, of zeropp."""
    model = sharded()
    adapter = fsdp2.apply(model)
    first, second = model.blocks
    first.set_custom_all_gather(gather := Gather())
    second.set_custom_reduce_scatter(reduce := Reduce())
    second.set_all_reduce_hook(hook := lambda output: None)
    model(tokens(0, dist.get_rank())).backward()
    adapter.remove()
    wrong = []
    if kinds(model) != [DEFAULT[0], ("Gather", DEFAULT[0][1]), (DEFAULT[0][0], "Reduce")]:
        wrong.append(str(kinds(model)))
    if hooks(first)[0] is not gather or hooks(second)[1] is not reduce:
        wrong.append("hooks of the same types")
    groups = [parameter_groups(module._get_fsdp_state())[0] for module in (model, first, second)]
    if [group._all_reduce_hook for group in groups] != [None, None, hook]:
        wrong.append("all-reduce hooks")
    # A second call takes nothing either.
    model.set_custom_all_gather(own := Gather())
    adapter.remove()
    if hooks(model)[0] is not own:
        wrong.append("a hook that was set after remove()")
    model(tokens(0, dist.get_rank())).backward()
    return wrong


def test_remove_leaves_hooks_that_others_have_set() -> None:
    assert run_ranks(4, hooks_of_others, local_world_size=2) == [[]] * 4


def after_the_end() -> list[tuple[str, str]]:
    """The user has ended torch.distributed before."""
    model = sharded()
    adapter = fsdp2.apply(model, feedback="both")
    model(tokens(0, dist.get_rank())).backward()
    before = adapter.state_dict()
    dist.destroy_process_group()
    assert adapter.state_dict().keys() == before.keys()
    adapter.remove()
    return kinds(model)


def test_remove_after_the_process_group_is_gone() -> None:
    assert run_ranks(4, after_the_end, local_world_size=2) == [DEFAULT] * 4


def exported() -> tuple[list[str], list[str]]:
    """Parameters of a full state dict that are not the sharded ones; and those that ``unshard()`` shows as they are."""
    model = sharded()
    fsdp2.apply(model)
    model(tokens(0, dist.get_rank()))
    exact = Net().state_dict()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    wrong = [name for name, value in state.items() if not torch.equal(value, exact[name])]
    for module in (*model.blocks, model):
        module.unshard()
    shown = [name for name, value in model.named_parameters() if torch.equal(value, exact[name])]
    return wrong, shown


def test_a_state_dict_is_exact_and_unshard_shows_decoded_weights() -> None:
    for rank, (wrong, shown) in enumerate(run_ranks(4, exported, local_world_size=2)):
        # A full state dict is rank 0's; values such as 0 and 1 may survive.
        assert wrong == [] and not any(name.endswith("0.weight") for name in shown), (rank, wrong, shown)
