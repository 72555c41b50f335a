"""Calls after ``zeropp.fsdp2.apply``: ``fully_shard``, hooks of the user, ``remove()``, state dicts and ``unshard()``.

The job has two nodes of two ranks.
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
    """Return the class names of the gather hook and the reduce hook of each unit."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [(type(gather).__name__, type(reduce).__name__) for gather, reduce, _ in map(hooks, units)]


DEFAULT = [("DefaultAllGather", "DefaultReduceScatter")] * 3


def cut(when: str, then: str) -> tuple[Any, Any]:
    """Shard a model with two calls or more of ``fully_shard``, and call ``fsdp2.apply``.

    Args:
        when: modules that are sharded last, "the root", "a block and the root" or "a new module".
        then: "between" to call apply before those modules are sharded, "behind" to call it after them.

    Returns:
        The model and the adapter.
    """
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
    """Train a model with modules that were sharded after ``fsdp2.apply``.

    Returns:
        The errors of the first and the second forward, and failures: parameters whose gradients are wrong after the
        error's advice was followed, or bytes that were sent before the error.
    """
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
def test_modules_sharded_after_apply_are_refused_at_first_use(when: str) -> None:
    """Following the error's advice (``remove()``, then ``apply``) gives the usual gradients."""
    names = {"a block and the root": "['(root)', 'blocks.1']", "a new module": "['head']"}.get(when, "['(root)']")
    for first, second, wrong in run_ranks(4, sharded_later, when, local_world_size=2):
        assert first == second and f"fully_shard was called on {names} after zeropp.fsdp2.apply" in first
        assert wrong == []


def a_part() -> list[str]:
    """Install adapters on the two blocks only, train, and return the units of all reductions in their ledgers."""
    model: Any = Net()
    for part in (*model.blocks, model):
        fully_shard(part)
    adapters = [fsdp2.apply(block) for block in model.blocks]
    model(tokens(0, dist.get_rank())).backward()
    return [row.unit for adapter in adapters for row in adapter.ledger.rows if row.kind == "reduce"]


def test_an_adapter_on_a_part_leaves_the_rest_to_fsdp2() -> None:
    assert run_ranks(4, a_part, local_world_size=2) == [["(root)"] * 4] * 4


class Gather(DefaultAllGather):
    """A gather hook of the user."""


class Reduce(DefaultReduceScatter):
    """A reduce hook of the user."""


def hooks_of_others() -> list[str]:
    """Return failures of ``remove()``: hooks of the user that it removed, or hooks of zeropp that it left."""
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
    # A second call of remove() must not remove hooks, either.
    model.set_custom_all_gather(own := Gather())
    adapter.remove()
    if hooks(model)[0] is not own:
        wrong.append("a hook that was set after remove()")
    # Nor may it remove the hooks of a later apply().
    model.set_custom_all_gather(DefaultAllGather())
    first.set_custom_all_gather(DefaultAllGather())
    second.set_custom_reduce_scatter(DefaultReduceScatter())
    second.set_all_reduce_hook(lambda output: None)
    for group in groups:
        group._all_reduce_hook = None
    fsdp2.apply(model)
    noted = [group.__dict__["post_backward"] for group in groups]
    adapter.remove()
    if [group.__dict__.get("post_backward") for group in groups] != noted:
        wrong.append("hooks of a later apply()")
    model(tokens(0, dist.get_rank())).backward()
    return wrong


def test_remove_leaves_hooks_that_others_have_set() -> None:
    assert run_ranks(4, hooks_of_others, local_world_size=2) == [[]] * 4


def after_the_end() -> list[tuple[str, str]]:
    """Call ``remove()`` after the user has destroyed the process group, and return the hooks of all units."""
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
    """Return the parameters that a full state dict gives inexactly, and those that ``unshard()`` gives exactly."""
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
    """A state dict reads the shards, which stay exact; ``unshard()`` shows weights after int8 rounding."""
    for rank, (wrong, shown) in enumerate(run_ranks(4, exported, local_world_size=2)):
        # Only rank 0 has a full state dict. Biases and norms may have values, such as 0 and 1, that int8 represents
        # exactly, so after unshard() only the first linear layer of each block is checked.
        assert wrong == [] and not any(name.endswith("0.weight") for name in shown), (rank, wrong, shown)
