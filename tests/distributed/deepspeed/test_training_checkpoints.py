"""Checkpoints of a training engine: exact resumption, tags, partial loads, other numbers of ranks, and refusals."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_engine import MICRO, STEPS, loss_of, model_of, settings, train
from tests.support.rank_pool import RankFailure, run_ranks, some
from zeropp import checkpoint
from zeropp.checkpoint import CheckpointError
from zeropp.checkpoint.metadata import Metadata
from zeropp.deepspeed.zero_to_fp32 import SCRIPT
from zeropp.training import Engine

CUT = 3
SINCE = 1  # runs save after the backward of this micro-batch of a window (index from 0)


def engine_of(**more: Any) -> Engine:
    engine: Engine = zeropp.initialize(model=model_of(), config=settings(**more))[0]
    return engine


def whole() -> tuple[list[float], list[float], dict[str, Tensor]]:
    engine = engine_of()
    losses, rates = train(engine, 0, STEPS)
    return losses[CUT * MICRO :], rates[CUT:], zeropp.full_state(engine.module)


def save_after(folder: Path, **more: Any) -> None:
    engine = engine_of(**more)
    train(engine, 0, CUT)
    assert engine.save_checkpoint(folder, client_state={"seen": [1, 2], "mean": torch.tensor(0.5)})


def resumed(folder: Path, tag: str | None, **more: Any) -> tuple[Any, ...]:
    engine = engine_of(**more)
    path, state = engine.load_checkpoint(folder, tag)
    counts = engine.global_steps, engine.global_samples
    losses, rates = train(engine, CUT, STEPS)
    return losses, rates, zeropp.full_state(engine.module), path, state, counts


def rates_after_a_load(folder: Path, offload: str) -> tuple[list[float], list[float]]:
    """Load a checkpoint while a schedule belongs to another optimizer with the same parameter groups.

    Accelerate makes a new optimizer from a script's groups, while the script's schedule keeps the script's optimizer.

    Args:
        folder: folder of the checkpoint.
        offload: device of the optimizer states.

    Returns:
        Learning rate of the engine after each step, and the rate of the schedule after each step.
    """
    model = model_of()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1 / (1 + step))
    config = settings() | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": offload}}}
    config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    optimizer = torch.optim.AdamW(theirs.param_groups)
    engine = zeropp.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    seen, said = [], []
    for step in range(3):
        train(engine, step, step + 1)
        schedule.step()
        seen.append(engine.optimizer.param_groups[0]["lr"])
        said.extend(schedule.get_last_lr())
    return seen, said


@pytest.mark.parametrize("offload", some(["none", "cpu"], 2))
def test_a_scheduler_of_another_optimizer_of_the_same_groups_goes_on_after_a_load(offload: str, tmp_path: Path) -> None:
    for seen, said in run_ranks(2, rates_after_a_load, tmp_path, offload):
        assert seen == said == [0.25, 0.5 / 3, 0.125]


@pytest.mark.parametrize("tag", some([None, "global_step3"], 2))
def test_resuming_is_as_if_nothing_had_happened(tag: str | None, tmp_path: Path) -> None:
    run_ranks(2, save_after, tmp_path)
    assert (tmp_path / "latest").read_text() == "global_step3"
    uninterrupted = run_ranks(2, whole)
    for (losses, rates, state), found in zip(uninterrupted, run_ranks(2, resumed, tmp_path, tag), strict=True):
        assert found[0] == losses and found[1] == rates and worst(found[2], state) == 0
        assert found[3] == str(tmp_path / "global_step3")
        assert found[4]["seen"] == [1, 2] and found[4]["mean"] == 0.5
        assert found[5] == (CUT, CUT * MICRO * 3 * 2)


def test_on_one_rank_in_another_stage(tmp_path: Path) -> None:
    run_ranks(2, save_after, tmp_path)
    ((*_, state, path, _, counts),) = run_ranks(1, resumed, tmp_path, None, zero={"stage": 1})
    assert path == str(tmp_path / "global_step3") and counts[0] == CUT
    assert worst(state, run_ranks(2, whole)[0][2]) > 0  # training on one rank's batches must give other weights


def saves_as_it_is(folder: Path) -> dict[str, Tensor]:
    engine = engine_of()
    engine.save_checkpoint(folder)
    return zeropp.full_state(engine.module)


def test_the_script_beside_checkpoints_writes_whole_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = run_ranks(2, saves_as_it_is, tmp_path)[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [SCRIPT, ".", "weights", "--tag", "global_step0"])
    runpy.run_path(SCRIPT, run_name="__main__")
    assert os.access(tmp_path / SCRIPT, os.X_OK)
    found = torch.load(tmp_path / "weights" / "pytorch_model.bin")
    assert found.keys() == state.keys() and worst(found, {name: value.float() for name, value in state.items()}) == 0


PARTS: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, [CUT, CUT - 1, True]),
    ({"load_optimizer_states": False}, [CUT, CUT - 1, False]),
    ({"load_lr_scheduler_states": False}, [CUT, -1, True]),
    ({"load_module_only": True}, [0, -1, False]),
]


def parts(folder: Path) -> list[tuple[float, list[Any], dict[str, Any]]]:
    """Load parts of a checkpoint.

    Returns:
        For each case of PARTS: difference of weights from the saved ones; [steps, iteration of the schedule, True if
        there are optimizer states]; client state.
    """
    first = engine_of()
    train(first, 0, CUT)
    saved = zeropp.full_state(first.module)
    first.save_checkpoint(folder, "here", save_latest=False)
    results = []
    for what, _ in PARTS:
        engine = engine_of()
        _, state = engine.load_checkpoint(folder, "here", **what)
        distance = worst(zeropp.full_state(engine.module), saved)
        found = [engine.global_steps, engine.lr_scheduler.last_batch_iteration, bool(engine.optimizer.state)]
        results.append((distance, found, dict(state)))
    return results


def test_parts(tmp_path: Path) -> None:
    for results in run_ranks(2, parts, tmp_path):
        assert results == [(0, wanted, {}) for _, wanted in PARTS]
    assert not (tmp_path / "latest").exists()


def nothing_there(folder: Path) -> list[Any]:
    engine = engine_of()
    with pytest.warns(UserWarning, match="no tag was given: nothing was loaded"):
        found = engine.load_checkpoint(folder)
    messages = [found]
    for given, kind in (
        ({"tag": "missing"}, CheckpointError),
        ({"tag": "x", "custom_load_fn": print}, TypeError),
    ):
        with pytest.raises(kind) as caught:
            engine.load_checkpoint(folder, **given)
        messages.append(str(caught.value))
    with pytest.raises(CheckpointError, match="client_state"):
        engine.save_checkpoint(folder, client_state={"args": object()})
    assert not any(folder.iterdir())
    return messages


def test_missing_checkpoints_and_refused_arguments(tmp_path: Path) -> None:
    for found, missing, function in run_ranks(2, nothing_there, tmp_path):
        assert found == (None, None)
        assert "missing" in missing and "custom_load_fn copies a whole state dict" in function


def trained_alone(folder: Path) -> tuple[float, bool]:
    model = model_of()
    next(model.parameters()).requires_grad_(False)
    engine = zeropp.initialize(model=model, config=settings())[0]
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    engine.load_checkpoint(folder)
    name, _ = next(engine.module.named_parameters())
    saved = Metadata.read(folder / "global_step0").tensors
    return worst(zeropp.full_state(engine.module), dict(model_of().state_dict())), f"model.{name}" in saved


def test_without_frozen_parameters(tmp_path: Path) -> None:
    assert run_ranks(2, trained_alone, tmp_path) == [(0.0, False)] * 2


def other_tags(folder: Path, how: str) -> tuple[list[str], list[str], float]:
    """Save under a tag that differs between ranks, and load.

    Args:
        folder: folder of the checkpoints.
        how: value of ``tag_validation``.

    Returns:
        Warnings about tags, names in the folder, and the difference of loaded weights from the saved ones.
    """
    engine = engine_of(checkpoint={"tag_validation": how})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(folder, tag=f"of rank {dist.get_rank()}")
    other = engine_of()
    with torch.no_grad(), zeropp.zero.GatheredParameters(other.module, modifier_rank=0):
        for parameter in other.module.parameters():
            parameter.zero_()
    other.load_checkpoint(folder)
    said = [str(each.message) for each in caught if "different tags" in str(each.message)]
    return said, sorted(os.listdir(folder)), worst(zeropp.full_state(other.module), dict(model_of().state_dict()))


@pytest.mark.parametrize("how", ["Ignore", "Warn"])
def test_ranks_with_other_tags_save_under_the_first_one_s(how: str, tmp_path: Path) -> None:
    (first, *saved), (second, *_) = run_ranks(2, other_tags, tmp_path, how)
    assert saved == [["latest", "of rank 0", SCRIPT], 0.0] and second == []
    assert len(first) == (how == "Warn") and all("'of rank 0', and rank 1 'of rank 1'" in each for each in first)


def test_ranks_with_other_tags_are_refused(tmp_path: Path) -> None:
    for failure in run_ranks(2, other_tags, tmp_path, "Fail", catch=True):
        assert isinstance(failure, RankFailure) and failure.is_a(CheckpointError)
        assert "different tags: rank 0 'of rank 0', and rank 1 'of rank 1'" in failure.message
    assert not any(tmp_path.iterdir())


def named_by_the_clock(root: Path) -> tuple[list[str], list[str], list[float]]:
    """Make all calls with a folder that differs between ranks, as if named after the time.

    Args:
        root: parent of the folders.

    Returns:
        Warnings, paths below ``root``, and for each load the difference of loaded weights from the saved ones.
    """
    folder = root / f"run-12.00.0{dist.get_rank()}"
    found: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(zero={"stage": 3, "stage3_gather_16bit_weights_on_model_save": True})
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder)
        series = checkpoint.Series(folder / "series")
        assert series.save(3, engine.module, engine.optimizer).is_dir()
        checkpoint.save(folder / "alone", engine.module, engine.optimizer, asynchronous=True)
        checkpoint.export(folder / "export", engine.module)
        loads: list[Callable[[Engine], object]] = [
            lambda engine: engine.load_checkpoint(folder),
            lambda engine: series.load(engine.module, engine.optimizer),
            lambda engine: checkpoint.load(folder / "alone", engine.module, engine.optimizer),
            lambda engine: checkpoint.load_safetensors(engine.module, folder / "export"),
            lambda engine: checkpoint.load_foreign(folder / "export", engine.module),
        ]
        for load in loads:
            other = engine_of()
            with torch.no_grad(), zeropp.zero.GatheredParameters(other.module, modifier_rank=0):
                for parameter in other.module.parameters():
                    parameter.zero_()
            load(other)
            found.append(worst(zeropp.full_state(other.module), dict(model_of().state_dict())))
        checkpoint.wait()
    said = [str(each.message).partition(" different paths")[0] for each in caught]
    return said, sorted(os.path.relpath(path, root) for path in root.glob("*/*")), found


def test_ranks_with_other_folders_use_that_of_rank_0(tmp_path: Path) -> None:
    """Different folders are not refused, because a long run would end at its first checkpoint.

    Rank 0 warns once per call.
    """
    (said, there, distances), (silent, *others) = run_ranks(2, named_by_the_clock, tmp_path)
    calls = ["save_checkpoint", *(f"checkpoint.{each}" for each in ("save_16bit_model", "save", "save", "export"))]
    calls += ["load_checkpoint", "checkpoint.load", "checkpoint.load"]
    calls += ["checkpoint.load_safetensors", "checkpoint.load_foreign"]
    assert said == [f"ranks gave {call}()" for call in calls] and silent == []
    assert others == [there, distances] and distances == [0.0] * 5
    names = ["alone", "export", "global_step0", "latest", "pytorch_model.bin", "series", SCRIPT]
    assert there == [f"run-12.00.00/{name}" for name in names]


def without_a_path(root: Path) -> list[str]:
    engine = engine_of()
    own = [root, None][dist.get_rank()]
    calls: list[Callable[[], object]] = [
        lambda: engine.save_checkpoint(own),
        lambda: engine.load_checkpoint(own),
        lambda: engine.save_16bit_model(own),
        lambda: checkpoint.save(own, engine.module, engine.optimizer),
        lambda: checkpoint.load(own, engine.module, engine.optimizer),
        lambda: checkpoint.export(own, engine.module),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_a_rank_without_a_path_is_refused_on_every_rank(tmp_path: Path) -> None:
    """A missing path on one rank raises on every rank at once. Other ranks must not wait for ``hang_timeout``."""
    first, second = run_ranks(2, without_a_path, tmp_path)
    names = ["save_checkpoint", "load_checkpoint", "checkpoint.save_16bit_model"]
    names += [f"checkpoint.{each}" for each in ("save", "load", "export")]
    assert first == second
    assert first == [
        f"{each}() got an empty path, or none, on ranks [1]; give one that all ranks see" for each in names
    ]
    assert list(tmp_path.iterdir()) == []


def halves(folder: Path) -> tuple[bool, bool, float]:
    engine = engine_of(zero={"stage": 3, "stage3_gather_16bit_weights_on_model_save": True})
    wrote = engine.save_16bit_model(folder)
    refused = engine_of().save_16bit_model(folder / "other")
    return wrote, refused, worst(engine.module_state_dict(), dict(model_of().state_dict()))


def test_weights_in_one_file(tmp_path: Path) -> None:
    assert run_ranks(2, halves, tmp_path) == [(True, False, 0.0)] * 2
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert worst(state, dict(model_of().state_dict())) == 0


def consolidated(stage: int, bf16: bool) -> tuple[Any, ...]:
    model = model_of().float() if bf16 else model_of()
    next(model.parameters()).requires_grad_(False)
    engine = zeropp.initialize(model=model, config=settings(zero={"stage": stage}, bf16={"enabled": bf16}))[0]
    state = engine._consolidated_16bit_state_dict()
    trained = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    try:
        other = engine._zero3_consolidated_16bit_state_dict()
    except ValueError as error:
        return state, trained, str(error)
    return state, trained, other


@pytest.mark.parametrize(("stage", "bf16"), [(3, True), (3, False), (1, True)])
def test_whole_weights_on_the_first_rank(stage: int, bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float64
    wanted = {name: value.float().to(dtype) if bf16 else value for name, value in model_of().state_dict().items()}
    first, second = run_ranks(2, consolidated, stage, bf16)
    state, trained, other = first
    assert state.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) and value.dtype == dtype for name, value in state.items())
    assert state.keys() - trained.keys() == {next(iter(state))}
    assert second[:2] == (None, None)
    if stage == 3:
        assert worst(other, state) == 0 and second[2] is None
    else:
        assert "is of stage 3, and this is 1" in other


def loads_whole() -> float:
    engine = engine_of()
    state = {name: value + 1 for name, value in model_of().state_dict().items()}
    engine.load_module_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict({})
    return worst(zeropp.full_state(engine.module), state)


def test_whole_weights_are_loaded() -> None:
    assert run_ranks(2, loads_whole) == [0.0] * 2


def saves_in_a_window(folder: Path) -> tuple[float, list[bool]]:
    """Save between backward and step.

    Args:
        folder: folder of the checkpoints.

    Returns:
        Largest difference of weights from a run that does not save; and a list: True if the first checkpoint has
        optimizer states, True if the second one has, True if its weights are those of an earlier step.
    """
    states, found = [], []
    for saves in (False, True):
        engine = engine_of()
        for number in range(CUT * MICRO):
            engine.backward(loss_of(engine, number, dist.get_rank()))
            if saves and number == (CUT - 1) * MICRO + SINCE:
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    engine.save_checkpoint(folder, "warned")
                said = [str(each.message) for each in heard if "inside a window" in str(each.message)]
                assert len(said) == (dist.get_rank() == 0)
                engine.save_checkpoint(folder, "all", in_window=True)
                engine.save_checkpoint(folder, "weights", in_window=True, weights_only=True)
            engine.step()
        states.append(zeropp.full_state(engine.module))
    for tag in ("all", "weights"):
        names = Metadata.read(folder / tag).tensors
        found.append(any(name.startswith("optimizer") for name in names))
    reloaded = engine_of()
    reloaded.load_checkpoint(folder, "weights", load_optimizer_states=False)
    found.append(worst(zeropp.full_state(reloaded.module), states[0]) > 1e-6)  # the saved weights are one step behind
    # A load starts the window anew, also for an engine that is in the middle of another window.
    reloaded.backward(loss_of(reloaded, 0, dist.get_rank()))
    reloaded.step()
    reloaded.load_checkpoint(folder, "warned")
    for number in range((CUT - 1) * MICRO, CUT * MICRO):
        reloaded.backward(loss_of(reloaded, number, dist.get_rank()))
        reloaded.step()
    return max(worst(*states), worst(zeropp.full_state(reloaded.module), states[0])), found


def test_a_save_between_two_steps_leaves_gradients_out_where_that_is_asked_for(tmp_path: Path) -> None:
    assert run_ranks(2, saves_in_a_window, tmp_path) == [(0.0, [True, False, True])] * 2
