"""A rank that makes other calls than the other ranks stops all ranks with an error.

The error comes within a bounded time, names the ranks, and is raised before any weights change.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.branch_routes import ALL
from tests.support.branching_models import Route, Routed, make_config, shards
from tests.support.rank_pool import run_ranks
from tests.support.sharded_and_plain import Pair

HANG, SILENCE = 2, 4  # seconds: hang_timeout, and the pause of a silent rank
REACHED = f"hang_timeout, {HANG} s, was reached"


class Leaver:
    """The calls of the last rank, while every other rank trains. Each method is one case of ``LEAVES``."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.optimizer, self.model = pair.optimizer, pair.model

    def forward(self, route: Route = ALL) -> Tensor:
        """Return the loss of a forward."""
        loss: Tensor = self.model(self.pair.batch(0), route).square().mean()
        return loss

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def no_forward(self) -> None:
        """Call ``step()`` without a forward, as after a batch that was discarded."""
        self.optimizer.zero_grad()
        self.optimizer.step()

    def second_step(self) -> None:
        """Call ``step()`` again, with the gradients of the previous step."""
        self.optimizer.step()

    def silent(self) -> None:
        """Wait for longer than the other ranks wait, and then train."""
        time.sleep(SILENCE)
        self.train()

    def two_forwards(self) -> None:
        """Run an additional forward before training."""
        with torch.no_grad():
            self.forward()
        self.train()

    def no_backward(self) -> None:
        """Call ``step()`` after a forward without a backward."""
        self.optimizer.zero_grad()
        self.forward()
        self.optimizer.step()

    def no_sync(self) -> None:
        """Run the backward inside ``no_sync``."""
        with self.optimizer.no_sync():
            self.forward().backward()
        self.optimizer.step()

    def skipped_step(self) -> None:
        """Leave out one ``step()``. The other ranks take it, and the next step must then fail on all ranks."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.train()

    def saves(self) -> None:
        """Call ``state_dict``, which gathers every unit, on one rank only."""
        self.model.state_dict()
        self.train()

    def saves_all(self) -> None:
        """Call ``full_state``, which gathers every unit, on one rank only."""
        zeropp.full_state(self.model)
        self.train()

    def loads(self) -> None:
        """Load weights on one rank only, which refreshes cached weights."""
        self.model.load_state_dict(Routed(5).state_dict())
        self.train()

    def resumes(self) -> None:
        """Load the optimizer's state on one rank only."""
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.train()


def leave(how: str, settings: dict[str, object]) -> tuple[str, float, bool, bool]:
    """Train three steps on all ranks; then the last rank makes other calls.

    Args:
        how: name of a method of :class:`Leaver`.
        settings: keys for ``make_config``.

    Returns:
        The error, the seconds until it was raised, True if weights changed without a completed step, and True if this
        rank completed another step before the error.
    """
    pair = Pair(Routed(5), make_config(hang_timeout=HANG, **settings))
    for _ in range(3):
        pair.train(ALL)
    before = shards(pair.optimizer)
    dist.barrier()
    start = time.monotonic()
    leaver = Leaver(pair)
    stepped = False
    try:
        if pair.rank == pair.world - 1:
            getattr(leaver, how)()
        else:
            leaver.train()
            stepped = True
            before = shards(pair.optimizer)
            leaver.train()
    except RuntimeError as error:
        message = str(error)
    else:
        message = ""
    seconds = time.monotonic() - start
    after = shards(pair.optimizer)
    return message, seconds, not all(map(torch.equal, before, after)), stepped


LEAVES = [
    "no_forward", "second_step", "silent", "two_forwards", "no_backward", "no_sync", "skipped_step",
    "saves", "saves_all", "loads", "resumes",
]  # fmt: skip
# Seconds in addition to hang_timeout: ranks exchange reports about the failure, and the machine may be slow.
GRACE = 5


def check_left(results: list[tuple[str, float, bool, bool]], how: str) -> None:
    """Assert that every rank raised the error in time, that the error names the rank, and that no weights changed."""
    for rank, (message, seconds, changed, stepped) in enumerate(results):
        assert "no longer in step" in message, f"rank {rank} said {message!r}"
        # The message lists ranks at the same place together: "ranks 0, 1 and 2 were ...".
        told = re.findall(r"ranks? ([\d, and]+) (?:was|were) ", message.partition("no longer in step: ")[2])
        assert str(rank) in re.findall(r"\d+", " ".join(told)), message
        assert "hang_timeout" not in message or (REACHED in message and seconds >= HANG)
        assert not changed, f"rank {rank} changed weights, then said {message!r}"
        assert seconds < HANG + GRACE + (SILENCE if how == "silent" else 0), f"rank {rank} took {seconds:.1f} s"
        assert not stepped or how == "skipped_step", f"rank {rank} stepped alone"
    # At least one rank has reached the timeout. Other ranks may have failed because that rank had ended.
    if how == "silent":
        assert any(REACHED in message for message, *_ in results)


@pytest.mark.every(16)
@pytest.mark.parametrize("how", LEAVES)
def test_a_rank_that_leaves_stops_every_rank(how: str) -> None:
    check_left(run_ranks(2, leave, how, {}), how)


@pytest.mark.campaign
@pytest.mark.parametrize("settings", [{"persist": 1000}, {"reuse": 0, "prefetch": 0}], ids=["persistent", "bare"])
@pytest.mark.parametrize("how", LEAVES)
def test_a_rank_that_leaves_four(how: str, settings: dict[str, object]) -> None:
    if how == "two_forwards" and "persist" in settings:
        pytest.skip("one rank may run a forward of persistent parameters alone: see test_generation.py")
    check_left(run_ranks(4, leave, how, settings, local_world_size=2), how)


def hung_gather(settings: dict[str, object]) -> tuple[str, float]:
    """Let rank 1 never call the model; return the other rank's error and the seconds until it was raised."""
    pair = Pair(Routed(), make_config(hang_timeout=1, **settings))
    for _ in range(2):
        pair.train(ALL)
    start = time.monotonic()
    if pair.rank == 1:
        time.sleep(4)
        return "", 0.0
    with pytest.raises(RuntimeError) as caught:
        pair.train(ALL)
    return str(caught.value), time.monotonic() - start


@pytest.mark.campaign
def test_the_unit_that_is_waited_for_is_named() -> None:
    message, seconds = run_ranks(2, hung_gather, {"reuse": 0, "prefetch": 0})[0]
    assert "rank 0 was waiting for the gather of unit 'blocks.0'" in message
    assert "rank 1 reported nothing" in message and message.startswith("rank 1 does not wait for others")
    assert seconds < 1 + GRACE


def silent_peer() -> str:
    """Return rank 0's error if rank 1 does not train and collectives run on the caller's thread."""
    pair = Pair(Routed(), make_config(overlap_comm=False, hang_timeout=1))
    pair.train(ALL)
    if pair.rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(RuntimeError) as caught:
        pair.train(ALL)
    with pytest.raises(RuntimeError, match="no longer in step"):
        pair.train(ALL)
    dist.barrier()
    return str(caught.value)


@pytest.mark.campaign
def test_without_overlap_the_error_is_named_too() -> None:
    message = run_ranks(2, silent_peer)[0]
    assert "no longer in step" in message and "rank 0 was gathering blocks.0" in message
