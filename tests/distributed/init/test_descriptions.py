"""Ranks compare descriptions of their models while wrapping: the bytes sent, and the error if models differ."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from zeropp.comm import hops, process_groups


def received(count: int, odd: dict[int, tuple[str, int]]) -> tuple[int, int, str]:
    """Wrap a model of ``count`` layers, and count the data of the comparison.

    Args:
        count: number of layers.
        odd: (name, outputs) of the last layer on ranks where it differs.

    Returns:
        Bytes of gathered rows, number of whole descriptions sent, and the error message.
    """
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    name, outputs = odd.get(dist.get_rank(), ("last", 4))
    model.add_module(name, nn.Linear(4, outputs))
    rows, texts = 0, 0

    def counted(own: Tensor, *args: Any) -> Tensor:
        nonlocal rows
        found = gather_rows(own, *args)
        rows += found.nbytes
        return found

    def noted(*args: Any) -> Any:
        nonlocal texts
        texts += 1
        return send_to_all(*args)

    gather_rows, send_to_all = process_groups.gather_rows, process_groups.send_to_all
    said = ""
    with patch.object(process_groups, "gather_rows", counted), patch.object(hops, "send_to_all", noted):
        try:
            zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
        except ValueError as error:
            said = str(error)
    return rows, texts, said


def test_a_large_model_is_compared_with_no_more_bytes() -> None:
    (small, _, _), (large, texts, said) = run_ranks(4, received, 2, {})[0], run_ranks(4, received, 60, {})[0]
    assert small == large < 4 * 256 * 16 and (texts, said) == (0, "")


def test_of_several_ranks_that_differ_the_first_is_told() -> None:
    """Every rank receives two whole descriptions: rank 0's and that of the first rank that differs."""
    odd = {2: ("last", 5), 3: ("end", 4)}
    for _, texts, said in run_ranks(4, received, 60, odd):
        assert texts == 2
        assert "ranks 0 and 2 bring different models" in said
        assert "rank 0 has 'last.weight (4, 4)" in said and "rank 2 has 'last.weight (5, 4)" in said
