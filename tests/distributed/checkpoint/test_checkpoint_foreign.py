"""``load_foreign`` reads weights and optimizer states from the files of other programs straight into shards."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import zeropp
from tests.support.checkpoint_training import Went, make_optimizer, states_of, train, wrap
from tests.support.checkpoint_training import went as state_of_rank
from tests.support.foreign_checkpoints import Evil, Large, bytes_read, check_loaded, reads, refused
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from tests.support.torch_and_fsdp2_jobs import FLAT, Shardable, fsdp2_saves, plain, train_plain
from zeropp import checkpoint
from zeropp.checkpoint.boxes import CheckpointError


def saved(path: Path, how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    state: dict[str, Any] = dict(model.state_dict())
    # Two layouts that torch.save keeps: a transposed matrix, and a view into a larger tensor.
    state["head.weight"] = state["head.weight"].t().contiguous().t()
    row = torch.zeros(500)
    row[100:400] = state["head.bias"]
    state["head.bias"] = row[100:400]
    if how == "nested":
        around = {f"module.{name}": value for name, value in state.items()}
        torch.save({"epoch": 3, "model": around, "optimizer": optimizer.state_dict()}, path / "all.pt")
        return path / "all.pt"
    if how == "prefix":
        torch.save({f"module.{name}": value for name, value in state.items()}, path / "state.pth")
        return path / "state.pth"
    if how == "folder":
        names = sorted(state)
        shards = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
        for file, own in shards.items():
            torch.save({name: state[name] for name in own}, path / file)
        index = {"weight_map": {name: file for file, own in shards.items() for name in own}}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return path
    dcp.save({"model": state, "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return path


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("how", "world", "name"),
    [("nested", 3, "stage 3"), ("prefix", 2, "hpz loco bf16"), ("folder", 2, "stage 1"), ("dcp", 2, "stage 3")],
)
def test_plain_torch(how: str, world: int, name: str, tmp_path: Path) -> None:
    """Files of plain torch load: nested with numbered states, prefixed, in several files, and from DCP in one process.

    Some tensors are transposed or views.
    """
    model, optimizer = plain()
    place, states = saved(tmp_path, how, model, optimizer), how in ("nested", "dcp")
    local = world if world == 3 else 2
    found = run_ranks(world, reads, place, name, states, local_world_size=local)
    check_loaded(found, model, optimizer if states else None)
    assert found[0].found is not None and found[0].found.missing == []


def test_training_goes_on_as_plain_torch_s(tmp_path: Path) -> None:
    model, optimizer = plain()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    losses = reads(tmp_path / "all.pt", "stage 3", True).losses
    assert losses == pytest.approx(train_plain(model, optimizer, range(4, 8)), rel=1e-6)


def test_the_model_twice(tmp_path: Path) -> None:
    """If a file has the model twice, a usual name is taken with a warning.

    Without a usual name, ``prefix`` must choose.
    """
    model, _ = wrap("stage 3")
    state, other = ({name: value + add for name, value in Model().state_dict().items()} for add in (1, 2))

    def reads_one(prefix: str | None = None, **saved: object) -> bool:
        torch.save(saved, tmp_path / "all.pt")
        checkpoint.load_foreign(tmp_path / "all.pt", model, prefix=prefix)
        return torch.equal(zeropp.full_state(model)["head.bias"], state["head.bias"])

    for name in ("model", "model_state_dict"):
        with pytest.warns(UserWarning, match=rf"under each of the prefixes \['ema\.', '{name}\.'\]; .* are taken"):
            assert reads_one(**{name: state, "ema": other})
    around = {f"module.{name}": value for name, value in state.items()}
    with pytest.warns(UserWarning, match=r"'model\.module\.'"):
        assert reads_one(model=around, ema={f"module.{name}": value for name, value in other.items()})
    for names in (("disc", "generator"), ("model", "state_dict")):
        with pytest.raises(CheckpointError, match=rf"\['{names[0]}\.', '{names[1]}\.'\]; choose one, such as prefix="):
            reads_one(**dict(zip(names, (other, state), strict=True)))
    assert reads_one("generator.", generator=state, disc=other)


def test_groups_that_list_names(tmp_path: Path) -> None:
    """States load by parameter name, from other groups in another order, and a tensor as learning rate loads, too."""
    model, optimizer = plain()
    named = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=torch.tensor(0.25))
    named.state.update(optimizer.state)
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "all.pt")
    found = reads(tmp_path / "all.pt", "stage 3", True)
    assert found.drawn == [0.25, 0.25]
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    check_loaded([found], model, optimizer)


def saves_titan(path: Path) -> dict[str, torch.Tensor]:
    """Save a checkpoint like torchtitan: names of weights at the top, flattened states under "optimizer"."""
    model = Shardable()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = make_optimizer(model)
    train_plain(model, optimizer, range(4))
    states = get_optimizer_state_dict(model, optimizer, options=FLAT)
    counts = {"step": torch.tensor(4, dtype=torch.int32), "tokens": 100}
    dcp.save({**get_model_state_dict(model), "optimizer": states, "train_state": counts}, checkpoint_id=path)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def test_torchtitan_s_names(tmp_path: Path) -> None:
    state = run_ranks(2, saves_titan, tmp_path)[0]
    found = run_ranks(2, reads, tmp_path, "stage 3", True, None, Shardable, local_world_size=2)
    assert all(torch.equal(found[0].state[name], value) for name, value in state.items())
    assert all(rank.found is not None and rank.found.fresh == [] for rank in found)


def test_fsdp2_goes_on_here(tmp_path: Path) -> None:
    """Training goes on from FSDP2's weights, states and settings.

    Losses agree to 1e-5, because the order of sums differs.
    """
    before = run_ranks(2, fsdp2_saves, tmp_path)
    after = run_ranks(2, reads, tmp_path, "stage 3", True, None, Shardable, local_world_size=2)
    for losses, rank in zip(before, after, strict=True):
        assert rank.losses == pytest.approx(losses, rel=1e-5)


def saves_state(path: Path) -> Went:
    model, optimizer = wrap("stage 3")
    train(model, optimizer, range(4))
    dcp.save({"app": checkpoint.state(model, optimizer)}, checkpoint_id=path)
    return state_of_rank(model, optimizer)


def test_a_dcp_checkpoint_of_zeropp_state_is_loaded(tmp_path: Path) -> None:
    """A DCP checkpoint of zeropp's own state loads, with boxes of any shape, a prefix, and a channels_last weight."""
    before = run_ranks(4, saves_state, tmp_path, local_world_size=2)
    after = run_ranks(2, reads, tmp_path, "stage 1", True, local_world_size=2)
    assert all(torch.equal(after[0].state[name], value) for name, value in before[0].state.items())
    left, right = states_of(after), states_of(before)
    assert all(torch.equal(left[n][k], v) for n in right for k, v in right[n].items())


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_rank_reads_its_share_and_no_more(tmp_path: Path) -> None:
    """A rank reads its share of the weights, a quarter with four ranks, and at most 2 % more."""
    model = Large()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    share = sum(tensor.nbytes for tensor in model.state_dict().values()) / 4
    for found in run_ranks(4, bytes_read, [tmp_path / "model.pt", tmp_path / "dcp"], False, local_world_size=2):
        assert [share <= nbytes <= 1.02 * share for nbytes in found] == [True] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_crafted_pickle_runs_nothing(tmp_path: Path) -> None:
    """A pickle that would run code is refused in every file of every format.

    The error on every rank names the file and the refused function.
    """
    mark, (model, optimizer) = tmp_path / "mark", plain()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "more": Evil(mark)}, tmp_path / "model.pt")
    for name in ("metadata", "item", "value"):
        dcp.save(state, checkpoint_id=tmp_path / name)
    (tmp_path / "metadata" / ".metadata").write_bytes(b"cposix\nsystem\n(S'touch " + bytes(mark) + b"'\ntR.")
    _put_in_place(tmp_path / "item", "model.head.weight", mark)
    _put_in_place(tmp_path / "value", "optimizer.param_groups.0.lr", mark)
    names = ["model.pt", "metadata", "item", "value"]
    files = ["model.pt", ".metadata", ".distcp", ".distcp"]
    for told in run_ranks(2, refused, [tmp_path / name for name in names], local_world_size=2):
        for each, file in zip(told, files, strict=True):
            assert file in each and ".system" in each and "is refused" in each, each
            assert "nothing was changed" in each
        assert "'model.head.weight' lies" in told[2] and "'optimizer.param_groups.0.lr' lies" in told[3]
    assert not mark.exists()


def _put_in_place(folder: Path, name: str, mark: Path) -> None:
    """Replace one item of a DCP folder by a crafted pickle.

    Args:
        folder: DCP checkpoint.
        name: name of the item.
        mark: file that the pickle would create if it ran.
    """
    metadata = FileSystemReader(folder).read_metadata()
    item = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    torch.save(Evil(mark), folder / "crafted")
    data = (folder / "crafted").read_bytes()
    path = folder / item.relative_path
    begin = path.stat().st_size
    with path.open("ab") as file:
        file.write(data)
    item.offset, item.length = begin, len(data)
    # Pickled, as torch's writer stores the metadata.
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path) as old:
        entries = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in entries.items():
            new.writestr(name, data)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_that_cannot_be_read_so(tmp_path: Path) -> None:
    """The error for an unreadable file names the path, the contents and the expected contents."""
    model, optimizer = wrap("stage 3")
    state = Model().state_dict()

    def told(path: Path, states: bool = False) -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load_foreign(path, model, optimizer if states else None)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "there is nothing at" in told(tmp_path / "none")
    assert "is of no format that is known here" in told(tmp_path)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "before 1.6" in told(tmp_path / "old.pt")
    torch.save(state, tmp_path / "a.pt")
    assert "has no optimizer states" in told(tmp_path / "a.pt", states=True)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[: len(data) // 2])
    assert "is damaged" in told(tmp_path / "cut.pt")
    compressed(tmp_path / "a.pt")
    assert "compressed" in told(tmp_path / "a.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds a list" in told(tmp_path / "list.pt")
    itself: dict[str, object] = {}
    itself["again"] = itself
    torch.save(itself, tmp_path / "itself.pt")
    assert "contains itself" in told(tmp_path / "itself.pt")
    torch.save({"other": torch.zeros(3)}, tmp_path / "other.pt")
    assert "has none of the model's tensors" in told(tmp_path / "other.pt")
    checkpoint.save(tmp_path / "own", model, optimizer)
    assert "zeropp.checkpoint.load" in told(tmp_path / "own")
    numbered = torch.optim.AdamW(model.parameters()).state_dict()
    torch.save({"model": state, "optimizer": numbered}, tmp_path / "groups.pt")
    assert "the same groups in the same order" in told(tmp_path / "groups.pt", states=True)
