"""``load_foreign`` reads weights and optimizer states from DeepSpeed's checkpoint folders straight into the shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zeropp
from tests.support.checkpoint_training import wrap
from tests.support.deepspeed_files import write_deepspeed
from tests.support.foreign_checkpoints import Evil, Large, bytes_read, check_loaded, reads, refused
from tests.support.rank_pool import run_ranks
from tests.support.torch_and_fsdp2_jobs import Other, other, plain
from zeropp import checkpoint
from zeropp.checkpoint.boxes import CheckpointError


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("stage", "written", "world", "name"),
    [
        (3, 3, 2, "stage 3"),
        (3, 4, 1, "stage 1"),
        (2, 3, 2, "hpz loco bf16"),
        (1, 2, 3, "stage 3"),
        (0, 2, 2, "stage 3"),
    ],
)
def test_folders_in_every_stage(stage: int, written: int, world: int, name: str, tmp_path: Path) -> None:
    """Folders load that were written by more, fewer or as many ranks. Stage 0 stands for DeepSpeed's bf16 optimizer."""
    model, optimizer = plain()
    write_deepspeed(tmp_path, model, optimizer, written, stage or 1, bf16=not stage)
    check_loaded(run_ranks(world, reads, tmp_path, name, True, local_world_size=world), model, optimizer)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world", [1, 2, 3, 6])
@pytest.mark.parametrize("written", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_folders_on_any_ranks(stage: int, written: int, world: int, tmp_path: Path) -> None:
    """Folders of any number of ranks load on any number of ranks.

    Some cases have more ranks than a parameter has elements. A sub-group has one parameter, or all parameters.
    """
    model, optimizer = plain()
    for number, size in enumerate((1, 100)):
        root = tmp_path / str(number)
        write_deepspeed(root, model, optimizer, written, stage or 1, bf16=not stage, per_sub_group=size)
        check_loaded(run_ranks(world, reads, root, "stage 3", True, local_world_size=world), model, optimizer)


def reads_other(path: Path) -> dict[str, torch.Tensor]:
    model = Other()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = {"zero_optimization": {"stage": 3}, "zeropp": {"unit_min_blocks": 0}}
    wrapped = zeropp.ZeroOptimizer(optimizer, model, config)
    checkpoint.load_foreign(path, model, wrapped)
    return zeropp.full_state(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_and_tied_weights(stage: int, tmp_path: Path) -> None:
    """Frozen weights are 16-bit in DeepSpeed's files, so they load rounded to bf16."""
    model, optimizer = other()
    folder = write_deepspeed(tmp_path, model, optimizer, 2, stage)
    for found in run_ranks(2, reads_other, folder):
        for name, value in model.state_dict().items():
            assert torch.equal(found[name], value.bfloat16().float() if name.startswith("frozen") else value), name


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_rank_reads_its_share_and_no_more(tmp_path: Path) -> None:
    """A rank reads its share of the weights, and three times as much with optimizer states; at most 2 % more."""
    model = Large()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    write_deepspeed(tmp_path, model, optimizer, 3, 3)
    share = sum(tensor.nbytes for tensor in model.state_dict().values()) / 4
    for states, parts in ((False, 1), (True, 3)):
        for (nbytes,) in run_ranks(4, bytes_read, [tmp_path], states, local_world_size=2):
            assert share <= nbytes / parts <= 1.02 * share


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_crafted_pickle_runs_nothing(tmp_path: Path) -> None:
    """A pickle that would run code is refused in either kind of file.

    The error on every rank names the file and the refused function.
    """
    mark, (model, optimizer) = tmp_path / "mark", plain()
    for name, pattern in (("optim", "*optim_states.pt"), ("states", "*model_states.pt")):
        folder = write_deepspeed(tmp_path / name, model, optimizer, 2, 3)
        file = sorted(folder.glob(pattern))[1]
        torch.save(
            {**torch.load(file, weights_only=False), "more": Evil(mark)} if name == "states" else Evil(mark), file
        )
    files = ["rank_1_mp_rank_00_optim", "rank_1_mp_rank_00_model"]
    for told in run_ranks(2, refused, [tmp_path / "optim", tmp_path / "states"], local_world_size=2):
        for each, file in zip(told, files, strict=True):
            assert file in each and ".system" in each and "is refused" in each, each
            assert "nothing was changed" in each
    assert not mark.exists()


def test_folders_that_are_incomplete(tmp_path: Path) -> None:
    model, optimizer = plain()
    wrapped, _ = wrap("stage 3")
    folder = write_deepspeed(tmp_path, model, optimizer, 3, 2)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(folder / "kept")
    with pytest.raises(CheckpointError, match="has no file of rank 1"):
        checkpoint.load_foreign(tmp_path, wrapped)
    (folder / "kept").rename(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="was written by 3 ranks and has the files of 2"):
        checkpoint.load_foreign(tmp_path, wrapped)
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(CheckpointError, match="has no folder 'global_step5'"):
        checkpoint.load_foreign(tmp_path, wrapped)
