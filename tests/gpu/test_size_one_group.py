"""Hops in a group of one rank leave data unchanged, and an engine forced to use such hops trains with the same bits.

On a GPU the group is NCCL's, so the test runs the collectives and streams of a run with many ranks. On CPU the same
calls go through the stand-in backend :mod:`bench.common.staged`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench.common import staged
from tests.gpu.delays import Delays, Trained, train
from tests.support.rank_pool import run_ranks
from zeropp.comm.hops import Comm, Hop, Ledger
from zeropp.params import buffer_maker
from zeropp.params.gradient import GradientPaths
from zeropp.partition.levels import BufferLayout, HopSpec, Placement
from zeropp.wire.encoding import Encoding
from zeropp.wire.paths import ReduceHop, ReducePath

BACKENDS = {"cpu": staged.NAME, "cuda": "nccl"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "bf16": {"bf16": {"enabled": True}, "reuse": 0, "prefetch": 0},
    "stage 1": {"stage": 1, "overlap_comm": True, "bf16": {"enabled": True}},
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "weights": {"zero_quantized_weights": True},
    "gradients": {"zero_quantized_gradients": True},
    "both, with feedback": {
        "zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {}, "feedback": "both",
    },
}  # fmt: skip


def join(device: str) -> None:
    """Initialize a process group of world size 1 with the device's backend."""
    staged.register()
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKENDS[device], **({"device_id": torch.device("cuda", 0)} if device == "cuda" else {}))


def hops(device: str) -> dict[str, list[bool]]:
    """Return one boolean per dtype for each collective: True if the result equals the input.

    The entry "reduce_scatter" has none for uint8.
    """
    join(device)
    ledger = Ledger()
    hop = Hop(HopSpec(1, 1, (0,), "local"), dist.group.WORLD, BACKENDS[device], 0, ledger, "gather")
    found: dict[str, list[bool]] = {"all_gather": [], "all_gather in place": [], "all_to_all": [], "reduce_scatter": []}
    for dtype in DTYPES:
        given = torch.arange(1000, device=device).remainder(251).to(dtype)
        out, place = torch.zeros_like(given), given.clone()
        hop.all_gather(out, given, hop.gather_key("a unit", "plain"))
        hop.all_gather(place, place, hop.gather_key("a unit", "plain"))
        found["all_gather"].append(torch.equal(out, given))
        found["all_gather in place"].append(torch.equal(place, given))
        (part,) = hop.all_to_all(given, hop.reduce_key("a unit", "plain"))
        (whole,) = hop.all_to_all(given, hop.reduce_key("a unit", "plain"), apart=False)
        found["all_to_all"].append(torch.equal(part, given) and torch.equal(whole, given))
        if dtype != torch.uint8:  # codes are never summed, so no reduce_scatter
            whole = hop.reduce_scatter(given, hop.reduce_key("a unit", "plain"))
            found["reduce_scatter"].append(torch.equal(whole, given))
    assert ledger.rows and all(row.bytes == 0 for row in ledger.rows), "a single rank has sent bytes"
    return found


@contextlib.contextmanager
def one_member_hops(links: tuple[str, ...]) -> Iterator[None]:
    """Give the paths of a single rank one hop per class of links; without this, such paths have no hops."""
    specs = tuple(HopSpec(1, 1, (0,), link) for link in links)

    def gradient_paths(
        comm: Comm, placement: Placement, layout: BufferLayout, key: buffer_maker.BufferKey, encoding: Encoding,
        device: torch.device,
    ) -> GradientPaths:  # fmt: skip
        codecs = encoding.gradient_codecs(specs, key.wire_dtype)
        hops = []
        for spec, codec in zip(specs, codecs, strict=True):
            fed_back = encoding.feeds_back(specs, spec)
            errors = codec.feedback(layout.numel, 1, encoding.beta, device) if fed_back else None
            hop = comm.hop("reduce", spec)
            by_backend = encoding.sums_by_backend(codec, spec, codec.nbytes(layout.numel), hop.backend)
            hops.append(ReduceHop(hop, codec, errors, by_backend))
        path = ReducePath(placement, 1, hops, key.wire_dtype)
        return GradientPaths(path, path, path, None)

    with (
        mock.patch.object(Placement, "gather_path", lambda self, outer, inner: specs),
        mock.patch.object(buffer_maker, "gradient_paths", gradient_paths),
    ):
        yield


def trained(device: str, settings: dict[str, Any], links: tuple[str, ...], late: bool) -> tuple[Trained, set[str]]:
    """Train over hops of one rank; return the results and the set of "collective kind link" strings of the calls."""
    join(device)
    taken: set[str] = set()

    def counted(method: Any) -> Any:
        def call(hop: Hop, *args: Any, **how: Any) -> Any:
            taken.add(f"{method.__name__} {hop.kind} {hop.spec.link}")
            return method(hop, *args, **how)

        return call

    delays = Delays(device, comm_streams=("gather", "reduce", "refresh"), computing=True) if late else None
    with (
        one_member_hops(links),
        mock.patch.object(Hop, "all_gather", counted(Hop.all_gather)),
        mock.patch.object(Hop, "all_to_all", counted(Hop.all_to_all)),
        mock.patch.object(Hop, "reduce_scatter", counted(Hop.reduce_scatter)),
    ):
        return train(device, settings, delays), taken


@pytest.mark.parametrize("device", DEVICES)
def test_each_hop_is_the_identity(device: str) -> None:
    (found,) = run_ranks(1, hops, device, init=False, timeout=100)
    assert {name: len(results) for name, results in found.items()} == {
        "all_gather": 4, "all_gather in place": 4, "all_to_all": 4, "reduce_scatter": 3,
    }  # fmt: skip
    assert all(all(results) for results in found.values()), found


@pytest.mark.every(4)
@pytest.mark.parametrize("links", [("local",), ("cross", "local")], ids="-".join)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_an_engine_over_hops_of_one_rank_trains_as_without(device: str, name: str, links: tuple[str, ...]) -> None:
    expected = train(device, SETTINGS[name])
    for late in (False, True):
        ((found, taken),) = run_ranks(
            1, trained, device, SETTINGS[name], links, late, init=False, timeout=100, env={"LOCAL_WORLD_SIZE": "1"}
        )
        assert expected.differs(found) == []
        kind = "refresh" if SETTINGS[name].get("stage") == 1 else "gather"
        assert {f"all_gather {kind} {link}" for link in links} <= taken
        # NCCL sums fp32 messages in reduce_scatter. Other messages use all_to_all, and the engine sums them.
        way = "reduce_scatter" if device == "cuda" and "bf16" not in SETTINGS[name] else "all_to_all"
        assert {f"{way} reduce {link}" for link in links} <= taken


@pytest.mark.every(2)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("device", DEVICES)
def test_codecs_on_late_streams_give_the_bits_of_codecs_in_the_model_s_stream(device: str, name: str) -> None:
    plain = train(device, {})
    results = []
    for settings, late in (({"overlap_comm": False}, False), ({}, False), ({}, True)):
        ((found, _),) = run_ranks(
            1, trained, device, {**QUANTIZED[name], **settings}, ("local",), late, init=False, timeout=100
        )
        results.append(found)
    assert results[0].differs(results[1]) == [] and results[0].differs(results[2]) == []
    assert plain.differs(results[0]), "nothing was quantized"
