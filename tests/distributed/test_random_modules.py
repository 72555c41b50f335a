"""Random small modules: equal to plain torch, or refused by name; never wrong, never hung."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.pair import Pair
from tests.distributed.random_modules import WIDTH, Spec, grow, specs
from tests.distributed.shapes import apart, make_config

PLACED: list[dict[str, object]] = [
    {},
    {"prefetch": 0, "reuse": 0, "live": 0},
    {"persist": 20},
    {"stage": 1},
    {"stage": 2, "overlap_comm": True},
]


def rows(step: int, micro: int, rank: int, spread: bool) -> Tensor:
    """Ranks branch differently only if ``spread``."""
    seed = 100 * step + 10 * micro
    generator = torch.Generator().manual_seed(seed + rank)
    x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    sign = 1 if spread or (seed // 10) % 2 else -1
    return x if spread else x.abs() * sign


def train(spec: Spec, placed: dict[str, object], micro: int, spread: bool) -> float:
    """The largest difference between weights after four steps, and between losses."""
    pair = Pair(
        grow(spec),
        make_config(hang_timeout=6, gradient_accumulation_steps=micro, **placed),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        batch=partial(rows, spread=spread),
        micros=micro,
    )
    off = 0.0
    for step in range(4):
        pair.zero_grad()
        for _ in range(micro):
            (loss,), expected = pair.sharded.backward(), pair.whole.backward()
            off = max(off, apart(loss, expected[pair.rank]))
        pair.step()
        if step == 1:
            with torch.no_grad():
                pair.model(rows(9, 0, pair.rank, spread))
    return max(off, pair.difference())


REFUSALS = ("The ranks are no longer in step", "backward reached a weight whose unit was released")
LEAST = 0.95  # of the modules must train; all of the forty do


def check(spec: Spec, placed: dict[str, object], micro: int, spread: bool) -> bool:
    """Whether the module trained; otherwise every rank has said why."""
    results = run_ranks(2, train, spec, placed, micro, spread, catch=True, timeout=60)
    failures = [result for result in results if isinstance(result, RankFailure)]
    if failures:
        assert len(failures) == 2, f"only one rank raised: {failures[0].text}"
        for failure in failures:
            assert failure.is_a(RuntimeError) and any(words in failure.message for words in REFUSALS), failure.text
        return False
    assert max(results) <= 1e-9, f"off by {results}"
    return True


def check_many(count: int, number: int) -> None:
    """Modules drawn with a seed."""
    trained: list[bool] = []

    @seed(number)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(spec=specs(), placed=st.sampled_from(PLACED), micro=st.sampled_from([1, 2]), spread=st.booleans())
    def one(spec: Spec, placed: dict[str, object], micro: int, spread: bool) -> None:
        trained.append(check(spec, placed, micro, spread))

    one()
    assert len(trained) >= count
    assert sum(trained) >= LEAST * len(trained), f"only {sum(trained)} of {len(trained)} trained, seed {number}"


@pytest.mark.every(4)
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("spec", [
    pytest.param(
        ("either", ("list", (("linear",), ("residual", ("linear",)), ("bare",))),
         ("sequence", (("tied", 1), ("again", 1)))),
        id="a module inside a unit's owner that another parent calls, too",
    ),
    pytest.param(
        ("either", ("checkpoint", ("linear",), False), ("checkpoint", ("frozen", ("tied", 1)), True)),
        id="recomputed in backward by the ranks that take one branch, where no order has that twice",
    ),
])  # fmt: skip
def test_modules_that_were_refused(spec: Spec, micro: int, spread: bool) -> None:
    assert check(spec, {"persist": 20}, micro, spread)


def test_twenty_modules() -> None:
    check_many(20, 1)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_many_modules() -> None:
    check_many(400, random.SystemRandom().getrandbits(32))
