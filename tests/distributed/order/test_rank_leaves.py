"""A rank that does something else than the others stops every rank, soon, by name, and before weights change."""

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

HANG, SILENCE = 2, 4  # seconds
REACHED = f"hang_timeout, {HANG} s, was reached"


class Leaver:
    """What the last rank does in place of a step; everyone else trains."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.optimizer, self.model = pair.optimizer, pair.model

    def forward(self, route: Route = ALL) -> Tensor:
        loss: Tensor = self.model(self.pair.batch(0), route).square().mean()
        return loss

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def no_forward(self) -> None:
        """Goes straight to the step, as after a batch that was thrown away."""
        self.optimizer.zero_grad()
        self.optimizer.step()

    def second_step(self) -> None:
        """Steps again, with the gradients of the step before."""
        self.optimizer.step()

    def silent(self) -> None:
        """Does something else for longer than the others wait, and comes back."""
        time.sleep(SILENCE)
        self.train()

    def two_forwards(self) -> None:
        """One pass too many."""
        with torch.no_grad():
            self.forward()
        self.train()

    def no_backward(self) -> None:
        self.optimizer.zero_grad()
        self.forward()
        self.optimizer.step()

    def no_sync(self) -> None:
        with self.optimizer.no_sync():
            self.forward().backward()
        self.optimizer.step()

    def skipped_step(self) -> None:
        """Does not step; its weights are old in the step after, which must not count."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.train()

    def saves(self) -> None:
        """``state_dict`` gathers every unit, on one rank only."""
        self.model.state_dict()
        self.train()

    def saves_all(self) -> None:
        zeropp.full_state(self.model)
        self.train()

    def loads(self) -> None:
        """Loading refreshes what is kept whole, on one rank only."""
        self.model.load_state_dict(Routed(5).state_dict())
        self.train()

    def resumes(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.train()


def leave(how: str, settings: dict[str, object]) -> tuple[str, float, bool, bool]:
    """Three common steps, then the last rank leaves; error, seconds, whether weights changed, whether one was late."""
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
GRACE = 5  # seconds beside hang_timeout: for the ranks' accounts of the failure, and for slow machines


def check_left(results: list[tuple[str, float, bool, bool]], how: str) -> None:
    for rank, (message, seconds, changed, stepped) in enumerate(results):
        assert "no longer in step" in message, f"rank {rank} said {message!r}"
        # Ranks that were at the same place are told together: "ranks 0, 1 and 2 were ...".
        told = re.findall(r"ranks? ([\d, and]+) (?:was|were) ", message.partition("no longer in step: ")[2])
        assert str(rank) in re.findall(r"\d+", " ".join(told)), message
        assert "hang_timeout" not in message or (REACHED in message and seconds >= HANG)
        assert not changed, f"rank {rank} changed weights, then said {message!r}"
        assert seconds < HANG + GRACE + (SILENCE if how == "silent" else 0), f"rank {rank} took {seconds:.1f} s"
        assert not stepped or how == "skipped_step", f"rank {rank} stepped alone"
    if how == "silent":  # somebody has waited for it; the others may have seen that one go
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
        pytest.skip("one rank may use weights that are whole everywhere alone: see test_generation.py")
    check_left(run_ranks(4, leave, how, settings, local_world_size=2), how)


def hung_gather(settings: dict[str, object]) -> tuple[str, float]:
    """Rank 1 never calls the model; the others say which unit they wait for."""
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
    """Rank 1 stays away; what rank 0 raises when everything runs in the caller's order."""
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
