"""Limits of a node's memory and disks: plans below them pass, and others are refused with numbers and remedies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from zeropp.config.base import ConfigError
from zeropp.optimizer.checks import count_states
from zeropp.plan import MemoryLimitError, MemoryPlan, memory

GIB = 2**30


def layers(count: int = 4) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(count)))


def plan(states: str, weights: str = "none", local: int = 2, device: str = "cuda", **keys: Any) -> MemoryPlan:
    where = {"nvme_path": "/nowhere"}
    blocks = {"offload_optimizer": {"device": states, **where}, "offload_param": {"device": weights, **where}}
    for key, value in keys.items():
        if key in ("max_in_cpu", "buffer_size"):
            blocks["offload_param"][key] = value
    zero = {"stage": 3, **blocks, **({"sub_group_size": keys["sub_group_size"]} if "sub_group_size" in keys else {})}
    return memory(layers(), {"zero_optimization": zero, "bf16": {"enabled": True}}, 2 * local, local, device=device)


def refusal(plan: MemoryPlan, **limits: int) -> str:
    with pytest.raises(MemoryLimitError) as caught:
        plan.require(**limits)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize("states", ["cpu", "nvme"])
def test_a_limit_is_of_all_ranks_of_a_node(states: str, local: int) -> None:
    own = plan(states, "nvme", local)
    node = local * own.host_total
    assert own.require(host_bytes=node, disk_bytes=local * own.disk_total) is own
    text = refusal(own, host_bytes=node - 1)
    assert f"at least {node:,} bytes ({node / GIB:.2f} GiB)" in text and f"and {node - 1:,} bytes" in text
    assert (f"the {local} ranks of a node need" if local > 1 else "the rank of a node needs") in text
    assert own.require() is own


def test_a_refusal_names_every_term_with_the_key_that_reduces_it() -> None:
    in_memory, in_files = plan("cpu", "cpu"), plan("nvme", "nvme", buffer_size=10**6)
    sent_up = plan("cpu")
    for own, terms, said in [
        (in_memory, ("main_weights", "gradients", "optimizer_states"), 'offload_optimizer.device "nvme"'),
        (in_memory, ("wire_weights",), 'offload_param.device "nvme"'),
        (sent_up, ("upload_staging",), "a lower sub_group_size (1,000,000,000 elements)"),
        (in_files, ("step_staging",), "sub_group_size (1,000,000,000 elements) or offload_optimizer.buffer_count (4)"),
        (in_files, ("gather_staging",), "offload_param.buffer_size (1,000,000 elements) or offload_param.buffer_count"),
    ]:
        lines = refusal(own, host_bytes=1).split("\n")
        (line,) = (line for line in lines if f"{own.host[terms[0]]:,} bytes" in line and said in line)
        assert all(f"{term.replace('_', ' ')} {own.host[term]:,} bytes" in line for term in terms)
        assert "more nodes" in lines[-1]


def test_each_setting_that_is_named_makes_its_term_less() -> None:
    own = plan("cpu", "cpu")
    files = plan("nvme", "cpu")
    assert files.host.get("main_weights", 0) + files.host.get("gradients", 0) < own.host["main_weights"]
    assert plan("nvme", "nvme", max_in_cpu=0).host.get("wire_weights", 0) == 0 < own.host["wire_weights"]
    assert plan("nvme", sub_group_size=10**5).host["step_staging"] < files.host["step_staging"]
    assert plan("cpu", sub_group_size=10**5).host["upload_staging"] < plan("cpu").host["upload_staging"]
    both = plan("nvme", "nvme")
    assert plan("nvme", "nvme", buffer_size=10**5).host["gather_staging"] < both.host["gather_staging"]
    text = refusal(plan("nvme", "nvme"), host_bytes=1)
    assert (
        "offload_param.max_in_cpu (1,000,000,000 elements) allows them" in text
        and "offload_optimizer.device" not in text
    )


def test_small_rows_that_stay_in_memory_are_told_of() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}
    with torch.device("meta"):
        own = memory(nn.Linear(200, 200), {"zero_optimization": zero}, 1)
    assert "rows of less than aio.block_size (1,048,576 bytes) stay in memory" in refusal(own, host_bytes=1)


def test_a_disk_has_a_limit_of_its_own() -> None:
    own = plan("nvme", "nvme", max_in_cpu=0)
    text = refusal(own, host_bytes=10**15, disk_bytes=2 * own.disk_total - 1)
    assert f"at least {2 * own.disk_total:,} bytes" in text and "nvme_path to a larger disk" in text
    assert "max_in_cpu" in text and 'offload_optimizer.device "cpu"' in text


def test_where_the_cpu_trains_units_count_too() -> None:
    own = plan("none", device="cpu")
    text = refusal(own, host_bytes=2 * own.host_total - 1)
    assert f"the largest unit, gathered, {own.largest_unit:,} bytes" in text and "unit_numel" in text
    assert f"optimizer states {own.device_states:,} bytes" in text
    assert sum(own.host_terms.values()) == own.host_total


@pytest.mark.parametrize("limits", [{"host_bytes": "24GB"}, {"disk_bytes": [1]}, {"host_bytes": True}], ids=str)
def test_a_limit_that_is_no_number(limits: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"the limit of the (host|disk) is .*; expected a number of bytes"):
        plan("cpu").require(**limits)


@pytest.mark.parametrize("limits", [{"host_bytes": -1}, {"disk_bytes": -5}])
def test_a_negative_limit(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected bytes, 0 or more"):
        plan("cpu").require(**limits)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True, capturable=True), 3),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.Adagrad(p), 1),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5), 3),
    ],
)
def test_states_of_an_optimizer_are_found_by_a_trial(make: Any, count: int) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = make([weight])
    before = copy.deepcopy(optimizer.state_dict())
    assert count_states(optimizer) == count
    assert weight.eq(1).all() and weight.grad is None
    # Adagrad has states from the beginning, so compare with the state before the trial.
    assert str(optimizer.state_dict()) == str(before)


def test_an_optimizer_that_cannot_step_here_counts_as_none() -> None:
    class Strange(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise NotImplementedError

    assert count_states(Strange([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)) == 0


def test_the_key() -> None:
    loaded = zeropp.config.load_config({"zero_optimization": {"stage": 3}, "zeropp": {"host_memory_limit": GIB}})
    assert loaded.zeropp.host_memory_limit == GIB
    with pytest.raises(ConfigError, match="host_memory_limit"):
        zeropp.config.load_config({"zeropp": {"host_memory_limit": 0}})
