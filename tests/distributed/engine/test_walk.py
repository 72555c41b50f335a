"""After learning, at most 9 frames in 6 files of zeropp lie between a hook and the collective that it leads to."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks, some
from zeropp.comm.streams import ThreadStream

FRAMES, FILES = 9, 6
OWN = Path(zeropp.__file__).parent
PLACED: dict[str, dict[str, object]] = {
    "stage 3": {},
    "quantized": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    "bf16": {"bf16": {"enabled": True}},
    "nothing overlapped": {"overlap_comm": False},
}


def own_frames() -> list[str]:
    """Return "file function" for each frame of zeropp on the call stack, outermost first."""
    frames = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
    return [f"{path.relative_to(OWN)} {name}" for path, name in frames if path.is_relative_to(OWN)]


def walks(settings: dict[str, object]) -> list[list[str]]:
    """Train six steps, and record the call stack of each collective in the last one.

    If a comm stream's thread runs the collective, the stack of the thread that queued the work comes first.

    Args:
        settings: keys for ``make_config``.

    Returns:
        zeropp's frames at each call of ``batch_isend_irecv``.
    """
    submitted, found = threading.local(), []
    queue, send = ThreadStream.run, dist.batch_isend_irecv

    def run(self: ThreadStream, *works: Callable[[], object], **more: Any) -> Any:
        outer = [*own_frames(), "comm/streams.py run"]  # the last entry is the method that this function replaces

        def carry() -> None:
            submitted.by = outer

        def drop() -> None:
            submitted.by = []

        return queue(self, carry, *works, drop, **more)

    def record(swap: list[dist.P2POp]) -> Any:
        found.append([*getattr(submitted, "by", []), *own_frames()])
        return send(swap)

    model = Routed()
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**{"overlap_comm": True, **settings})
    )
    for step in range(6):
        with mock.patch.object(ThreadStream, "run", run), mock.patch.object(dist, "batch_isend_irecv", record):
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step < 5:
            found.clear()
    return found


@pytest.mark.parametrize("placement", some(PLACED, 4))
def test_the_way_from_a_hook_to_a_collective_is_short(placement: str) -> None:
    for found in run_ranks(4, walks, PLACED[placement], local_world_size=2):
        weights = [frames for frames in found if any("schedule" in frame for frame in frames)]
        gradients = [frames for frames in found if any("gradient_ready" in frame for frame in frames)]
        assert weights and gradients, "nothing was seen on its way"
        for frames in (*weights, *gradients):
            files = {frame.split()[0] for frame in frames}
            assert len(frames) <= FRAMES and len(files) <= FILES, "\n".join(frames)
