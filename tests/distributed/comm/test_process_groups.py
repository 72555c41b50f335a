"""The members of a process group, their nodes if no launcher names them, and the backends and sockets in use."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import warnings
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import zeropp
import zeropp.fsdp2
from bench.common import staged
from tests.support.branching_models import make_config
from tests.support.rank_pool import RankFailure, run_ranks, some
from tests.support.using_page import check_page
from zeropp.comm import process_groups as groups
from zeropp.comm.process_groups import HOST, find_members, is_fake, send_to_all


def test_the_page_with_torch_s_own_start(tmp_path: Path) -> None:
    """docs/using.md works after init_process_group(), which names no backend: hops still send pairwise over gloo."""
    check_page("torch.distributed.init_process_group()", tmp_path)


def wrapped_alone() -> list[str]:
    """Wrap a model without a process group while WORLD_SIZE is set, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Linear(64, 64)
        zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    return [str(each.message) for each in caught]


def test_ranks_that_forgot_to_join_are_warned() -> None:
    """Without the warning, each rank would train a model of its own unnoticed."""
    for told in run_ranks(2, wrapped_alone, init=False):
        assert any("WORLD_SIZE is 2 and there is no process group" in text for text in told), told
    (told,) = run_ranks(1, wrapped_alone, init=False)
    assert not any("WORLD_SIZE" in text for text in told)


def placed(hosts: list[str], launcher: str | None, claimed: int | None) -> tuple[int, set[str]]:
    """Take a step with given host names and LOCAL_WORLD_SIZE.

    Args:
        hosts: host name of each rank.
        launcher: value of LOCAL_WORLD_SIZE; None if it is not set.
        claimed: local_world_size of the configuration; None if it is not given.

    Returns:
        Ranks per node, and the classes of links ("local", "cross") that carried traffic.
    """
    os.environ.pop("LOCAL_WORLD_SIZE")
    if launcher is not None:
        os.environ["LOCAL_WORLD_SIZE"] = launcher
    model = nn.Linear(64, 64)
    with patch.object(socket, "gethostname", lambda: hosts[dist.get_rank()]):
        optimizer = zeropp.ZeroOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(local_world_size=claimed)
        )
    optimizer.backward(model(torch.ones(1, 64)).sum())
    optimizer.step()
    links = {row.link for row in zeropp.comm_report(model).rows if row.kind != "control"}
    return optimizer.engine.comm.local, links


NODES: dict[str, tuple[list[str], str | None, int | None, int, set[str]]] = {
    "one host": (["a"] * 4, None, None, 4, {"local"}),
    "four hosts": (["a", "b", "c", "d"], None, None, 1, {"cross"}),
    "two hosts": (["a", "a", "b", "b"], None, None, 2, {"local", "cross"}),
    "the launcher wins": (["a"] * 4, "2", None, 2, {"local", "cross"}),
    "the config wins": (["a"] * 4, "4", 1, 1, {"cross"}),
}


@pytest.mark.parametrize("name", some(NODES, 2))
def test_nodes_from_host_names(name: str) -> None:
    hosts, launcher, claimed, local, links = NODES[name]
    assert run_ranks(4, placed, hosts, launcher, claimed) == [(local, links)] * 4


WRONG: dict[str, tuple[list[str], str | None, int | None, str]] = {
    "uneven": (["a", "a", "a", "b"], None, None, "same number of ranks"),
    "one after the other": (["a", "b", "b", "a"], None, None, "one node after the other"),
    "cyclic": (["a", "b", "a", "b"], None, None, "cyclic placement.*srun --distribution=block.*mpirun --map-by slot"),
    "cyclic under a launcher": (["a", "b", "a", "b"], "2", None, "cyclic placement.*--distribution=block"),
    "a node on two hosts": (["a", "a", "b", "b"], "4", None, "rank 0 on host 'a' and rank 2 on host 'b'"),
    "a node on two hosts in the config": (["a", "b", "c", "d"], "1", 2, "rank 0 on host 'a' and rank 1 on host 'b'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nodes_that_host_names_contradict(name: str) -> None:
    *given, pattern = WRONG[name]
    for failure in run_ranks(4, placed, *given, catch=True, timeout=40):
        assert isinstance(failure, RankFailure) and failure.type_name == "ValueError"
        assert re.search(pattern, failure.message), failure.message


def adapted(hosts: list[str]) -> set[str]:
    """Apply the FSDP2 adapter with given host names and no launcher, and return the classes of links that it used."""
    os.environ.pop("LOCAL_WORLD_SIZE")
    model = fully_shard(nn.Linear(64, 64))
    with patch.object(socket, "gethostname", lambda: hosts[dist.get_rank()]):
        adapter = zeropp.fsdp2.apply(model)
    model(torch.ones(1, 64)).sum().backward()
    return {row.link for row in adapter.ledger.rows}


def test_nodes_of_the_fsdp2_adapter_from_host_names() -> None:
    assert run_ranks(4, adapted, ["a", "a", "b", "b"]) == [{"local", "cross"}] * 4
    assert run_ranks(4, adapted, ["a"] * 4) == [{"local"}] * 4


def sockets() -> int:
    """Return the number of open sockets of this process."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The descriptor of this listing is closed by now.
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def connections(many: int) -> tuple[int, list[int], str]:
    """Make a group for rows, gather a row of each rank over it, and broadcast an object.

    Args:
        many: number of ranks above which only ranks that exchange rows connect.

    Returns:
        Number of sockets that the group opened, the gathered rows, and the object sent by rank 5.
    """
    with patch.object(groups, "_MANY", many):
        before, timeout = sockets(), timedelta(seconds=60)
        group = groups.make_group(range(dist.get_world_size()), "gloo", timeout, f"rows {many}", HOST, for_rows=True)
        made = sockets() - before
        rows = groups.gather_rows(torch.tensor([dist.get_rank()]), group, timeout)
        assert sockets() - before == made, "members that gather rows had not connected"
        said = send_to_all(f"rank {dist.get_rank()}", 5, group, 60.0)
        groups.free_groups([group])
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    return made, rows.view(-1).tolist(), said


@pytest.mark.campaign
def test_of_many_ranks_those_connect_that_send_to_each_other() -> None:
    """With the lazy connections, each of 8 ranks sends to the ranks 1, 2 and 4 places away.

    This takes 5 connections and one listening socket per rank.
    """
    for made, *found in run_ranks(8, connections, 7):
        assert found == [list(range(8)), "rank 5"] and made <= 6
    for made, *found in run_ranks(8, connections, 8):
        assert found == [list(range(8)), "rank 5"] and made >= 7


def test_sockets_of_many_ranks_fit_the_process() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        groups.allow_files(8)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, before[1]), "raised without need"
        groups.allow_files(1023)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1023 + len(os.listdir("/proc/self/fd"))
        groups.allow_files(2 * before[1])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def on_a_card(backends: str) -> tuple[str, str, bool]:
    """Find the members of a group for a CUDA model, and wrap a CPU model over the same group.

    Args:
        backends: argument of init_process_group.

    Returns:
        Backend for the CUDA model, error message for the CPU model ("" if there is none), and True if the engine would
        use the user's group.
    """
    staged.register()
    dist.init_process_group(backends)
    group = dist.group.WORLD
    assert group is not None and not is_fake(group)
    said = ""
    try:
        # All ranks must wrap, because they exchange their errors. This exchange uses host memory, and no backend of the
        # device.
        zeropp.ZeroOptimizer(torch.optim.SGD((model := nn.Linear(4, 4)).parameters(), lr=0.1), model, make_config())
    except ValueError as error:
        said = str(error)
    members = find_members(group, torch.device("cuda", 0), None, {})
    return members.backend, said, members.shared is group


CARDS = {
    "cuda:staged": ("staged", r"on cpu.*\['cuda'\] only", True),
    "cpu:gloo,cuda:staged": ("staged", "^$", True),
    "cpu:gloo": ("nccl", "^$", False),
    "gloo": ("nccl", "^$", False),
    None: ("nccl", "^$", False),
}


@pytest.mark.parametrize("backends", CARDS, ids=str)
def test_backends_used_for_a_model_on_a_gpu(backends: str) -> None:
    """The user's backend for CUDA is used, unless it is gloo, which cannot carry CUDA tensors.

    Without such a backend, the backend is nccl. Ranks can exchange the errors of wrapping even if the user's group has
    no CPU backend.
    """
    backend, pattern, shared = CARDS[backends]
    for found, said, is_shared in run_ranks(2, on_a_card, backends, init=False):
        assert (found, is_shared) == (backend, shared)
        assert re.search(pattern, said), said


def wrapped_twice() -> tuple[list[str], int]:
    """Wrap two models over one group whose CPU backend is not gloo, and close one engine.

    Returns:
        Names of the host groups that zeropp has made, and the result of an all-reduce over the user's group.
    """
    staged.register()
    dist.init_process_group("cpu:staged")
    optimizers = []
    for _ in range(2):
        model = nn.Linear(400, 400)
        optimizers.append(zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config()))
    world = dist.group.WORLD
    assert all(each.engine.comm.world_group is world for each in optimizers)
    optimizers[0].engine.close()
    names = [name for name in dist.distributed_c10d._world.pg_names.values() if name.startswith("zeropp host")]
    total = torch.ones(1)
    dist.all_reduce(total)  # The user's group must outlive the engine.
    return names, int(total)


def test_the_group_of_agreement_is_made_once() -> None:
    for names, total in run_ranks(2, wrapped_twice, init=False):
        assert len(names) == 1 and total == 2


def off_the_network() -> str:
    """Wrap a model while GLOO_SOCKET_IFNAME names an interface that does not exist, and return the error."""
    os.environ["GLOO_SOCKET_IFNAME"] = "nonesuch0"
    try:
        with pytest.raises(RuntimeError) as caught:
            zeropp.ZeroOptimizer(torch.optim.SGD((model := nn.Linear(4, 4)).parameters(), lr=0.1), model, make_config())
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
    return str(caught.value)


def test_a_network_that_is_not_there_is_named_with_the_variable() -> None:
    for message in run_ranks(2, off_the_network):
        assert "GLOO_SOCKET_IFNAME" in message and "nonesuch0" in message and "multinode.md" in message
