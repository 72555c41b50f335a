"""In a forked child, as data loaders make them, calls that need the parent's threads raise an error; nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeropp
from zeropp.comm.streams import ThreadEvent, ThreadStream
from zeropp.optimizer.host_step import HostStep


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child and return its exit code: 1 if ``work`` raised, minus the signal if killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_streams_and_events() -> None:
    stream, gate, ended = ThreadStream("test"), threading.Event(), ThreadEvent()
    ended.finish(None)
    under_way = stream.run(gate.wait)

    def work() -> None:
        for refused in (lambda: stream.run(lambda: None), lambda: under_way.wait(5)):
            with pytest.raises(
                RuntimeError, match=f"process {os.getpid()} was forked from the process that wrapped the model"
            ):
                refused()
        # Events that happened before the fork count as done in the child, and the child can make its own streams.
        assert ended.wait(5)
        own = ThreadStream("child")
        assert own.run(lambda: None).wait(5)
        own.close()
        stream.close()

    assert in_child(work) == 0
    gate.set()
    assert under_way.wait(5)
    stream.close()


def trained(block: dict[str, Any], fork: Callable[[nn.Module, Any], None] | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": block}
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer = zeropp.ZeroOptimizer(inner, model, {"zero_optimization": zero, "zeropp": {"unit_min_blocks": 0}})
    for step in range(4):
        optimizer.backward(model(torch.full((2, 64), float(step))).square().mean())
        optimizer.step()
        if fork is not None:
            fork(model, optimizer)
        optimizer.zero_grad()
    state = zeropp.full_state(model)
    optimizer.close()
    return state


CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "forward": lambda model, optimizer: model(torch.ones(2, 64)),
    "full_state": lambda model, optimizer: zeropp.full_state(model),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "states": lambda model, optimizer: optimizer.state_dict(),
    "step": lambda model, optimizer: optimizer.step(),
    "offload_states": lambda model, optimizer: optimizer.offload_states(),
}


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_offloaded_model(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in a child are refused while the parent's step is pending, and the parent trains on with the same bits."""
    gate, step = threading.Event(), HostStep._step

    def slow(*arguments: Any) -> None:
        assert gate.wait(60)
        step(*arguments)

    monkeypatch.setattr(HostStep, "_step", slow)
    block = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}

    def fork(model: nn.Module, optimizer: Any) -> None:
        for name, call in CALLS.items():

            def work(call: Callable[[nn.Module, Any], object] = call) -> None:
                # The message begins with the fork (^), because no other rank is the cause.
                with pytest.raises(
                    RuntimeError, match=r"^process \d+ was forked from the process that wrapped the model"
                ):
                    call(model, optimizer)

            assert in_child(work) == 0, name
        gate.set()
        zeropp.full_state(model)
        gate.clear()

    gate.set()
    plain = trained(block, None)
    gate.clear()
    forked = trained(block, fork)
    assert all(torch.equal(value, forked[name]) for name, value in plain.items())
    assert not list(tmp_path.iterdir())


def test_workers_of_a_data_loader() -> None:
    """Data loader workers are forked while the parent's threads have work; they deliver their batches and end."""
    seen = []

    def fork(model: nn.Module, optimizer: Any) -> None:
        data: Any = torch.utils.data.DataLoader(range(8), num_workers=2, multiprocessing_context="fork", timeout=20)
        batches = iter(data)
        workers = batches._workers
        seen.append(torch.cat(list(batches)).tolist())
        del batches
        for worker in workers:
            worker.join(20)
        assert [worker.exitcode for worker in workers] == [0, 0]

    trained({"device": "cpu"}, fork)
    assert seen == [list(range(8))] * 4
