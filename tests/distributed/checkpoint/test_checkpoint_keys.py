"""Configuration keys for loading and saving weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import zeropp
from tests.support.checkpoint_training import make_optimizer, train
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint.load import Restore


def wrapped(stage: int, bf16: bool = True, **zero: object) -> tuple[Any, zeropp.ZeroOptimizer]:
    model = Model()
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}}
    config |= {"bf16": {"enabled": bf16}, "zeropp": {"unit_min_blocks": 0, "hang_timeout": 30}}
    return model, zeropp.ZeroOptimizer(make_optimizer(model), model, config)


def rounds(path: Path, stage: int, keep: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = wrapped(stage)
    train(model, optimizer, range(2))
    checkpoint.save(path, model, optimizer)
    before = zeropp.full_state(model)
    model, optimizer = wrapped(stage, load_from_fp32_weights=keep)
    checkpoint.load(path, model, optimizer)
    after = zeropp.full_state(model)
    # Weights that are not in the file must stay unchanged.
    model, optimizer = wrapped(stage, load_from_fp32_weights=keep)
    first = zeropp.full_state(model)
    if dist.get_rank() == 0:
        save_file({"head.weight": before["head.weight"]}, path.with_name("part.safetensors"))
    dist.barrier()
    checkpoint.load_safetensors(model, path.with_name("part.safetensors"), strict=False)
    part = zeropp.full_state(model)
    assert torch.equal(part["head.weight"], after["head.weight"])
    assert all(torch.equal(part[name], value) for name, value in first.items() if name != "head.weight")
    return before, after


@pytest.mark.every(3)
@pytest.mark.parametrize(("stage", "keep"), [(3, True), (1, False), (3, False)])
def test_main_weights_of_a_checkpoint(stage: int, keep: bool, tmp_path: Path) -> None:
    """Main weights of a checkpoint are loaded in full, or rounded to bf16 with load_from_fp32_weights=False."""
    for before, after in run_ranks(2, rounds, tmp_path / "here", stage, keep):
        assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())
        assert all(torch.equal(after[n], v if keep else v.bfloat16().float()) for n, v in before.items())


def saves_whole(path: Path, stage: int, gather: bool) -> tuple[bool, bool, dict[str, Tensor], list[str]]:
    model, optimizer = wrapped(stage, stage3_gather_16bit_weights_on_model_save=gather)
    train(model, optimizer, range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = checkpoint.save_16bit_model(path / "all", model)
    told = [str(each.message) for each in caught if "was not written" in str(each.message)]
    model.table.requires_grad_(False)
    trained = checkpoint.save_16bit_model(path / "trained", model, "some.bin", exclude_frozen_parameters=True)
    checkpoint.export(path / "out" / "computed.pt", model, layout="torch")
    checkpoint.export(path / "out" / "main.pt", model, layout="torch", dtype=torch.float32)
    return saved, trained, zeropp.full_state(model), told


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore:.* was not written")
@pytest.mark.parametrize(("stage", "gather"), [(3, True), (3, False), (2, False)])
def test_whole_weights_in_16_bits(stage: int, gather: bool, tmp_path: Path) -> None:
    """save_16bit_model writes in stages below 3, and in stage 3 only if the key allows it.

    Otherwise rank 0 warns, and nothing is written. export writes in any case.
    """
    ranks = run_ranks(2, saves_whole, tmp_path, stage, gather)
    writes = stage < 3 or gather
    assert [rank[:2] for rank in ranks] == [(writes, writes)] * 2
    assert [len(rank[3]) for rank in ranks] == [int(not writes), 0]
    assert (tmp_path / "all").exists() == writes
    for name, dtype in (("computed", torch.bfloat16), ("main", torch.float32)):
        exported = torch.load(tmp_path / "out" / f"{name}.pt", weights_only=True)
        assert ranks[0][2].keys() == exported.keys()
        assert all(torch.equal(exported[n], v.to(dtype)) for n, v in ranks[0][2].items())
    assert len(list((tmp_path / "out").iterdir())) == 2
    if writes:
        found = torch.load(tmp_path / "all" / "pytorch_model.bin", weights_only=True)
        expected = {name: value.bfloat16() for name, value in ranks[0][2].items()}
        assert found.keys() == expected.keys() and all(torch.equal(found[n], v) for n, v in expected.items())
        trained = torch.load(tmp_path / "trained" / "some.bin", weights_only=True)
        assert found.keys() - trained.keys() == {"table.weight"}
        assert [each.name for each in (tmp_path / "all").iterdir()] == ["pytorch_model.bin"]


def loads_in_turns(path: Path, turns: bool, fails: int | None) -> tuple[list[tuple[int, str]], str]:
    model, optimizer = wrapped(3, pipeline_loading_checkpoint=turns)
    checkpoint.save(path, model, optimizer)
    log, read = path.with_name("log"), Restore.read_values

    def logged(load: Restore) -> None:
        with log.open("a") as file:
            file.write(f"{dist.get_rank()} begins\n")
        if dist.get_rank() == fails:
            raise OSError("the disk is broken")
        read(load)
        with log.open("a") as file:
            file.write(f"{dist.get_rank()} ends\n")

    Restore.read_values = logged  # type: ignore[method-assign]
    try:
        checkpoint.load(path, model, optimizer)
        told = ""
    except (checkpoint.CheckpointError, OSError) as error:
        told = str(error)
    finally:
        Restore.read_values = read  # type: ignore[method-assign]
    dist.barrier()
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(rank), what) for rank, what in lines], told


def test_ranks_of_a_node_read_in_turn(tmp_path: Path) -> None:
    """pipeline_loading_checkpoint: the second rank of each node reads after both first ranks have finished."""
    order, told = run_ranks(4, loads_in_turns, tmp_path / "here", True, None, local_world_size=2)[0]
    assert told == "" and {rank for rank, _ in order[:4]} == {0, 2} and {rank for rank, _ in order[4:]} == {1, 3}


def test_one_that_fails_in_its_turn_ends_all(tmp_path: Path) -> None:
    ranks = run_ranks(4, loads_in_turns, tmp_path / "here", True, 2, local_world_size=2)
    assert all("the disk is broken" in told for _, told in ranks)
    assert {rank for rank, _ in ranks[0][0]} == {0, 2}
