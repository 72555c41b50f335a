"""Nothing is lost or ignored without an error or a warning: folders of other savers, averages, and one-sided states."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zeropp
from tests.support.checkpoint_training import small, step, train, wrap
from tests.support.quantized_model import Model
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint.boxes import CheckpointError

EXTRA = "_extra_state"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that must be set before os.pwrite writes."""
    opened, write = threading.Event(), os.pwrite

    def waits(*arguments: Any) -> int:
        assert opened.wait(30)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", waits)
    return opened


def test_a_series_keeps_checkpoints_that_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A series deletes unfinished checkpoints named by a series only, and none that this process is writing."""
    actor, critic = small(), small()
    for name in ("step-00000001-hf", "step-6", "step-00000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000-01234567-00000.safetensors").write_text("half")
    opened, write = threading.Event(), os.pwrite

    def waits(*arguments: Any) -> int:
        assert threading.current_thread() is threading.main_thread() or opened.wait(30)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", waits)
    checkpoint.save(tmp_path / "step-00000009", *critic, asynchronous=True)
    while not any(tmp_path.glob("step-00000009/*.safetensors")):
        time.sleep(0.01)
    series = checkpoint.Series(tmp_path)
    series.save(5, *actor)
    opened.set()
    checkpoint.wait()
    found = sorted(each.name for each in tmp_path.iterdir())
    assert found == ["latest", "step-00000001-hf", "step-00000005", "step-00000009", "step-6"]
    for step_, pair in ((5, actor), (9, critic)):
        checkpoint.load(series.path(step_), *pair)


def test_two_models_and_one_path(tmp_path: Path, gate: threading.Event) -> None:
    first, second = small(), small()
    checkpoint.save(tmp_path / "here", *first, asynchronous=True)
    with pytest.raises(CheckpointError, match="is being written there by this process; wait"):
        checkpoint.save(tmp_path / "here", *second)
    gate.set()
    checkpoint.wait()
    checkpoint.load(tmp_path / "here", *first)
    checkpoint.save(tmp_path / "here", *second)


def test_a_program_that_goes_to_another_directory(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path refers to the working directory at the time of the call, also if the save completes later."""
    pair = small()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    gate.set()
    checkpoint.Series(tmp_path / "b" / "run").save(10, *pair)
    gate.clear()
    monkeypatch.chdir(tmp_path / "a")
    checkpoint.Series("run", keep=1).save(1, *pair, asynchronous=True)
    monkeypatch.chdir(tmp_path / "b")
    gate.set()
    checkpoint.wait()
    assert checkpoint.Series(tmp_path / "a" / "run").latest() == 1
    assert checkpoint.Series("run").steps() == [10]


def test_files_that_go_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = small()
    checkpoint.save(tmp_path / "here", *pair)
    kept = (tmp_path / "here" / "metadata.json").read_bytes()
    fsync, before = os.fsync, {*(tmp_path / "here").glob("*.safetensors")}

    def removes(descriptor: int) -> None:
        fsync(descriptor)
        for each in {*(tmp_path / "here").glob("*.safetensors")} - before:
            each.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", removes)
        with pytest.raises(CheckpointError, match="are gone since they were written"):
            checkpoint.save(tmp_path / "here", *pair)
    assert (tmp_path / "here" / "metadata.json").read_bytes() == kept
    checkpoint.load(tmp_path / "here", *pair)


def test_an_engine_that_is_closed_has_its_error_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wait() raises the error of a closed engine's save once."""
    pair = small()

    def full(*_: Any) -> int:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "pwrite", full)
    checkpoint.save(tmp_path / "here", *pair, asynchronous=True)
    pair[1].close()
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.wait()
    checkpoint.wait()


class Counting(nn.Linear):
    """A module with extra state."""

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


@pytest.mark.parametrize(
    ("saved", "loaded", "words", "unexpected", "missing"),
    [
        (lambda: Counting(4, 4), lambda: nn.Linear(4, 4), r"the model has no \['_extra_state'\]", [EXTRA], []),
        (lambda: nn.Linear(4, 4), lambda: Counting(4, 4), r"the checkpoint no \['_extra_state'\]", [], [EXTRA]),
        (lambda: Tied(False), lambda: Tied(True), "the model ties 'b.weight' to 'a.weight'", ["b.weight"], []),
    ],
)  # fmt: skip
def test_models_that_differ(
    saved: Callable[[], nn.Module], loaded: Callable[[], nn.Module], words: str, unexpected: list[str],
    missing: list[str], tmp_path: Path,
) -> None:  # fmt: skip
    """A load between different models is refused with the names of the differences, before anything changes.

    strict=False permits it.
    """
    before, here = small(saved()), small(loaded())
    step(before)
    checkpoint.save(tmp_path / "here", *before)
    kept = zeropp.full_state(here[0])
    with pytest.raises(CheckpointError, match=f"{words}.*nothing was changed"):
        checkpoint.load(tmp_path / "here", *here)
    assert all(torch.equal(value, kept[name]) for name, value in zeropp.full_state(here[0]).items())
    found = checkpoint.load(tmp_path / "here", *here, strict=False)
    assert (found.unexpected, found.missing) == (unexpected, missing)
    weights = zeropp.full_state(before[0])
    assert all(
        torch.equal(value, weights[name]) for name, value in zeropp.full_state(here[0]).items() if name != "b.weight"
    )


def test_states_that_are_wanted_and_not_there(tmp_path: Path) -> None:
    pair = small()
    step(pair)
    checkpoint.save(tmp_path / "here", pair[0])
    with pytest.raises(CheckpointError, match=r"was saved without an optimizer.*nothing was changed"):
        checkpoint.load(tmp_path / "here", *pair)
    assert checkpoint.load(tmp_path / "here", *pair, strict=False).fresh == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert not checkpoint.load(tmp_path / "here", *pair, only=["model"]).fresh
    with pytest.raises(ValueError, match="no optimizer is given"):
        checkpoint.load(tmp_path / "here", pair[0], only=["optimizer"])


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    """A missing file is found before anything changes."""
    pair = small()
    checkpoint.save(tmp_path / "here", *pair)
    next((tmp_path / "here").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read.*nothing was changed"):
        checkpoint.load(tmp_path / "here", *pair)


def test_inference_mode(tmp_path: Path) -> None:
    """A load inside inference mode leaves a model that can be trained."""
    pair = small()
    step(pair)
    checkpoint.save(tmp_path / "here", *pair)
    with torch.inference_mode():
        checkpoint.load(tmp_path / "here", *pair)
    step(pair)


def test_numpy_s_generators(tmp_path: Path) -> None:
    """numpy's generator is restored if it is of the same kind; otherwise it is seeded anew, with a warning."""
    pair, kept = small(), numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(5))
        checkpoint.save(tmp_path / "here", *pair)
        expected = numpy.random.rand(3)
        checkpoint.load(tmp_path / "here", *pair)
        assert (numpy.random.rand(3) == expected).all()
        numpy.random.set_bit_generator(numpy.random.MT19937(5))
        with pytest.warns(UserWarning, match="was a PCG64 when it was saved, and is a MT19937 here"):
            checkpoint.load(tmp_path / "here", *pair)
    finally:
        numpy.random.set_bit_generator(kept)


def test_weights_that_were_never_loaded(tmp_path: Path) -> None:
    """A save of weights without values is refused, because NaN would replace a good checkpoint."""
    with torch.device("meta"):
        model = Model()
    zeropp.zero.materialize(model)
    pair = small(model)
    for save in (checkpoint.save, checkpoint.export, checkpoint.save_16bit_model):
        with pytest.raises(RuntimeError, match="have no values yet, or NaN"):
            save(tmp_path / "here", model)  # type: ignore[operator]
    assert not list(tmp_path.iterdir())
    model.load_state_dict(Model().state_dict())
    checkpoint.save(tmp_path / "here", *pair)


def test_views_that_are_negated_when_they_are_read(tmp_path: Path) -> None:
    pair = small(nn.Linear(4, 4))
    there = {"weight": torch.ones(4, 4), "bias": torch.ones(4, dtype=torch.complex64).mul(1j).conj().imag}
    torch.save(there, tmp_path / "there.pt")
    with pytest.raises(CheckpointError, match="conjugated or negated view"):
        checkpoint.load_foreign(tmp_path / "there.pt", pair[0])
    torch.save({name: value.resolve_neg() for name, value in there.items()}, tmp_path / "there.pt")
    checkpoint.load_foreign(tmp_path / "there.pt", pair[0])
    assert torch.equal(zeropp.full_state(pair[0])["bias"], -torch.ones(4))


@pytest.mark.parametrize("nbytes", ["5GB", 0, True])
def test_sizes_of_files_that_are_none(nbytes: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"file_nbytes is .*; expected a number of bytes"):
        checkpoint.export(tmp_path / "here", small()[0], file_nbytes=nbytes)


def test_paths_that_go_up(tmp_path: Path) -> None:
    pair = small()
    checkpoint.save(tmp_path / "a" / ".." / "b", *pair)
    checkpoint.load(tmp_path / "a" / ".." / "b", *pair)
    assert [each.name for each in tmp_path.iterdir()] == ["b"]


def test_a_series_waits_for_the_checkpoint_that_it_loads(tmp_path: Path, gate: threading.Event) -> None:
    pair, series = small(), checkpoint.Series(tmp_path)
    series.save(1, *pair, asynchronous=True)
    threading.Timer(0.3, gate.set).start()
    found = series.load(*pair)
    assert found is not None and found[0] == 1


@pytest.mark.parametrize("how", ["pt", "safetensors"])
def test_others_files_of_a_model_that_was_not_tied(how: str, tmp_path: Path) -> None:
    """Most programs store a tied weight under every name.

    Different values under two names are refused, because one of them would be lost.
    """
    plain, pair = Tied(False), small(Tied(True))
    path = tmp_path / f"there.{how}"

    def load(**given: Any) -> checkpoint.Loaded:
        state = plain.state_dict()
        save_file(state, path) if how == "safetensors" else torch.save(state, path)
        if how == "safetensors":
            return checkpoint.load_safetensors(pair[0], path, **given)
        return checkpoint.load_foreign(path, pair[0], **given)

    with pytest.raises(
        CheckpointError,
        match=r"the model ties 'b.weight' to 'a.weight', but the checkpoint has other.*nothing was changed",
    ):
        load()
    load(strict=False)
    assert torch.equal(zeropp.full_state(pair[0])["b.weight"], plain.a.weight)
    plain.b.weight.data.copy_(plain.a.weight.data)
    load()
    plain.b.weight = nn.Parameter(plain.a.weight.bfloat16())  # equal up to rounding to bf16
    load()
    plain.b.weight = nn.Parameter(torch.cat([plain.a.weight.detach(), torch.zeros(2, 4)]))
    with pytest.raises(
        CheckpointError, match=r"has shape \(6, 4\), and .a.weight. has shape \(4, 4\); strict=False takes 'a.weight'"
    ):
        load()
    load(strict=False)


def unfreezes(path: Path, name: str, saves: bool) -> tuple[list[float], dict[str, Any], list[str]]:
    """Resume a model that is wrapped with frozen parameters and then unfrozen.

    Args:
        path: folder of the checkpoint.
        name: configuration of the run that saves.
        saves: True to train and save; False to wrap a frozen model, unfreeze it and load.

    Returns:
        Losses of the next steps, averaged weights, and names of parameters without loaded states.
    """
    model, optimizer = wrap(name if saves else "frozen")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    average, fresh = zeropp.ema(model, 0.9), list[str]()
    if saves:
        for each in range(3):
            train(model, optimizer, [each])
            average.update()
        checkpoint.save(path, model, optimizer, {"ema": average})
    else:
        fresh = checkpoint.load(path, model, optimizer, {"ema": average}).fresh
    with average.applied():
        averages = zeropp.full_state(model)
    return train(model, optimizer, range(3, 6)), averages, fresh


def test_parameters_that_are_unfrozen_before_a_load(tmp_path: Path) -> None:
    """Parameters that are unfrozen before a load get their optimizer states and averages."""
    before = run_ranks(2, unfreezes, tmp_path / "here", "stage 3", True)
    after = run_ranks(2, unfreezes, tmp_path / "here", "stage 3", False)
    for (losses, averages, _), (own, found, fresh) in zip(before, after, strict=True):
        assert own == pytest.approx(losses, abs=1e-6) and fresh == []
        assert all(torch.equal(found[name], value) for name, value in averages.items())


def frozen_here(path: Path, saves: bool) -> list[str]:
    model, optimizer = wrap("stage 3" if saves else "frozen")
    train(model, optimizer, [0])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if saves:
            checkpoint.save(path, model, optimizer)
        else:
            checkpoint.load(path, model, optimizer)
    return [str(each.message) for each in found]


def test_states_of_parameters_that_are_frozen_here(tmp_path: Path) -> None:
    """States of parameters that are frozen in the loading model are not loaded; rank 0 warns about them."""
    run_ranks(2, frozen_here, tmp_path / "here", True)
    told = run_ranks(2, frozen_here, tmp_path / "here", False)
    assert ["which are frozen here: they are not loaded" in "".join(each) for each in told] == [True, False]


def test_a_step_of_numpy(tmp_path: Path) -> None:
    series, pair = checkpoint.Series(tmp_path), small()
    series.save(numpy.int64(7), *pair)  # type: ignore[arg-type]
    assert series.latest() == 7
