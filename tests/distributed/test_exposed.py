"""Time that the model stands still for a unit is in the report, with that unit."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.shapes import Routed, make_config
from zeropp.comm import Hop

SLOW = 0.6  # seconds; more than a busy machine holds a rank up


def waited(kind: str, method: str) -> dict[tuple[str, str], float]:
    """Exposed seconds by unit and kind, where one unit's hop is slow."""
    model = Routed()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(reuse=0))
    slept = 0
    usual = getattr(Hop, method)

    def slow(self: Hop, first: object, *args: object, **kwargs: object) -> object:
        nonlocal slept
        if "blocks.2" in args and not slept:
            slept += 1
            time.sleep(SLOW)
        return usual(self, first, *args, **kwargs)

    with mock.patch.object(Hop, method, slow):
        optimizer.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
    assert slept
    return {(row.unit, row.kind): row.exposed for row in zeropp.comm_report(model).rows if row.kind == kind}


@pytest.mark.parametrize(("kind", "method"), [("gather", "all_gather"), ("reduce", "exchange")])
def test_what_the_model_waits_for_is_reported_with_its_unit(kind: str, method: str) -> None:
    for found in run_ranks(2, waited, kind, method):
        assert found["blocks.2", kind] > 0.7 * SLOW
        assert max(found, key=lambda key: found[key]) == ("blocks.2", kind)
