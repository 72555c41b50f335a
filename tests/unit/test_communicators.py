"""Limits on NCCL's thread blocks, their sums and the option of NCCL that takes them; sharing of communicators.

The tests need neither a GPU nor NCCL.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from zeropp import _compat
from zeropp.comm import communicators
from zeropp.comm.communicators import Communicator, Ctas, Key, choose_ctas, least, most_ctas, require_room
from zeropp.setup.choices import choose_ctas_limits, choose_sharing

CARD = torch.device("cuda", 0)
NCCL_PAGE = Path(__file__).resolve().parents[2] / "docs" / "nccl.md"


def test_limits_follow_the_card() -> None:
    assert choose_ctas(132) == Ctas(16, 8)
    assert choose_ctas(58) == Ctas(7, 3)
    assert choose_ctas(4) == Ctas(1, 1)
    assert choose_ctas(132, local=24) == Ctas(24, 8)
    config = zeropp.config.load_config({"zeropp": {"max_ctas": {"cross": 4}}})
    assert choose_ctas_limits(config, 108) == Ctas(13, 4)


def test_limits_of_concurrent_collectives_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL rounds channels of sends and receives up to a power of two; NCCL_* variables override zeropp's limits."""
    gather, exchange = (13, False), (13, True)
    assert most_ctas([gather, exchange]) == 13 + 16
    assert most_ctas([gather, (None, True)]) is None
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "20")
    assert most_ctas([gather, exchange]) == 20 + 32
    monkeypatch.setenv("NCCL_MIN_P2P_NCHANNELS", "33")
    assert most_ctas([gather, exchange]) == 20 + 64
    monkeypatch.setenv("NCCL_MAX_CTAS", "24")
    assert most_ctas([gather, (None, True)]) == 24 + 64


def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:

    def held(kind: str, limit: int) -> Communicator:
        group: Any = SimpleNamespace(group_name=kind)
        return Communicator(Key(kind, "", (0, 1), "nccl", CARD, timedelta(seconds=1), limit), group)

    monkeypatch.setattr(communicators, "processors", lambda device: 64)
    require_room([held(kind, 32) for kind in ("gather", "reduce")], CARD)
    listed = r"97 thread blocks \(gather over 2 ranks, reduce over 2 ranks; limits \[33\]\), and cuda:0 has 64"
    with pytest.raises(ValueError, match=listed):
        require_room([held(kind, 33) for kind in ("gather", "reduce")], CARD)
    # All-reduces over the user's own group need thread blocks as well, more of them for larger messages.
    few = [held("gather", 20), held("reduce", 32)]
    require_room(few, CARD, sums_nbytes=12 << 12)
    with pytest.raises(
        ValueError, match=r"65 thread blocks \(gather over 2 ranks, reduce over 2 ranks, your own group;"
    ):
        require_room(few, CARD, sums_nbytes=(12 << 12) + 1)
    with pytest.raises(ValueError, match="84 thread blocks"):
        require_room(few, CARD, sums_nbytes=1 << 20)


def test_cards_that_differ() -> None:
    """All ranks use the smallest limits, because NCCL needs the same number of channels on every rank."""
    assert least([Ctas(16, 8), Ctas(13, 6), Ctas(16, 8)]) == Ctas(13, 6)
    assert least([Ctas(), Ctas()]) == Ctas()


def test_the_limit_reaches_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is passed in the group's NCCL options, which the test replaces: torch may be built without NCCL."""
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=None), _timeout=None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: options), raising=False)
    default = SimpleNamespace(bound_device_id=None)
    made = mock.Mock(return_value=(SimpleNamespace(), None))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", made)
    monkeypatch.setattr(_compat, "default_store", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_group_ranks=mock.MagicMock()))
    seconds = timedelta(seconds=9)
    _compat.new_group([0, 1], "nccl", seconds, "a group", CARD, 12)
    assert made.call_args.args[6] is options and (options.config.max_ctas, options._timeout) == (12, seconds)
    _compat.new_group([0, 1], "nccl", seconds, "a group", CARD)
    assert made.call_args.args[6] is None


@pytest.mark.parametrize(
    ("settings", "device", "kinds", "engines"),
    [
        ({}, "cuda", True, True),
        ({"zeropp": {"share_communicators": False}}, "cuda", True, False),
        # With offload, threads launch the work, so kinds of traffic have no common order and share no communicator.
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "cuda", False, False),
        ({}, "cpu", False, False),
        ({"zero_optimization": {"stage": 3, "overlap_comm": False}}, "cpu", True, True),
    ],
)
def test_settings_choose_which_communicators_are_shared(
    settings: dict[str, Any], device: str, kinds: bool, engines: bool
) -> None:
    sharing = choose_sharing(zeropp.config.load_config(settings or None), torch.device(device))
    assert (sharing.kinds, sharing.engines) == (kinds, engines)


def counts(world: int, local: int, *, offload: bool) -> list[tuple[int | None, bool]]:
    """Return a pair (limit, True if it sends and receives) for each communicator planned for an H100."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 5000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    plan = zeropp.plan.memory(model, config, world, local)
    limits = choose_ctas(132)
    return [(limits.for_link(each.link), "reduce" in each.kind) for each in plan.communicators]


def test_the_page_says_how_many() -> None:
    """docs/nccl.md gives the right number of communicators and of thread blocks on an H100."""
    text = re.sub(r"\s+", " ", NCCL_PAGE.read_text())
    plain, offloaded = counts(16, 8, offload=False), counts(16, 8, offload=True)
    assert "2 on one node" in text and len(counts(8, 8, offload=False)) == 2
    assert "and 5 on several nodes" in text and len(plain) == 5
    assert "up to 7" in text and len(offloaded) == 7
    assert f"| H100, H200 | 132 | 16, 8 | {most_ctas(plain)}, {most_ctas(offloaded)} |" in text
