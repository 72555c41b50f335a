"""Validation, tests and predictions through zeropp's strategy, exported files, and the memory after training."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.rank_pool import run_ranks
from zeropp.checkpoint.metadata import Metadata

LAUNCHED = {"TORCHELASTIC_RUN_ID": "tests"}


def evaluated(folder: Path) -> list[str]:
    """Validate, fit, test and predict with one model, in two Trainers with different settings.

    Args:
        folder: working directory.

    Returns:
        Descriptions of results that differ from plain torch.
    """
    from tests.support import lightning_cases as cases

    wrong: list[str] = []

    def look(what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            wrong.append(f"{what}: {found}, expected {wanted}")

    def loss_of(weights: dict[str, Any]) -> Any:
        """Return the loss of plain torch on the samples of both ranks."""
        twin = cases.Module()
        twin.load_state_dict(weights)
        with torch.no_grad():
            losses = [twin.loss(batch) for batch in cases.DataLoader(cases.Data(), 4)]
        return pytest.approx(float(sum(losses) / len(losses)), abs=1e-5)

    module = cases.built()
    begins = {name: value.clone() for name, value in module.state_dict().items()}
    for value in begins.values():
        dist.broadcast(value, 0)
    run = cases.trainer(cases.strategy(stage=3, offload_optimizer=True), folder, **cases.TRAINING)
    data = cases.loader()
    # Validate twice, because an engine exists at the second time.
    for number in range(2):
        (result,) = run.validate(module, data, verbose=False)
        look(f"validated {number}", result["val_loss"], loss_of(begins))
        look("trained again", {each.requires_grad for each in module.parameters()}, {True})
    run.fit(module, **cases.loaders())
    state = zeropp.full_state(module)
    look("moved", float((state["net.1.weight"] - begins["net.1.weight"]).abs().max()) > 0.01, True)
    look("tested", run.test(module, data, verbose=False)[0]["val_loss"], loss_of(state))
    twin = cases.Module()
    twin.load_state_dict(state)
    with torch.no_grad():
        for batch, found in zip(data, run.predict(module, data), strict=True):
            look("predicted", float((found - twin(batch[:, : cases.WIDTH])).abs().max()) < 1e-5, True)
    # Another Trainer with other settings evaluates the first one's model, and then trains it.
    other = cases.trainer(cases.strategy(stage=1), folder, **cases.TRAINING)
    look("tested elsewhere", other.test(module, data, verbose=False)[0]["val_loss"], loss_of(state))
    other.fit(module, **cases.loaders())
    look("stage", other.strategy.engine.zero_optimization_stage(), 1)
    state = zeropp.full_state(module)
    look("tested by the first", run.test(module, data, verbose=False)[0]["val_loss"], loss_of(state))
    run.fit(module, **cases.loaders())
    look("steps", other.strategy.own_engine, None)
    return wrong


def measured(folder: Path) -> list[Any]:
    """Train a module that contains metrics.

    Args:
        folder: folder of a checkpoint.

    Returns:
        The metric during training, of a test afterwards, of a test from the checkpoint, and the error that plain torch
        computes.
    """
    import torchmetrics

    from tests.support import lightning_cases as cases

    class Measured(cases.Module):
        """A module with metrics, which Lightning resets, moves and copies, and with a submodule as a hyperparameter."""

        def __init__(self, part: torch.nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.part = part
            # Each phase needs a metric of its own, because Lightning resets the metrics of a phase at its end.
            self.error, self.val_error = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.error(self(batch[:, : cases.WIDTH]), batch[:, cases.WIDTH :].contiguous())
            self.log("error", self.error, on_step=False, on_epoch=True)
            return super().training_step(batch, index)

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.val_error(self.part(self(batch[:, : cases.WIDTH])), batch[:, cases.WIDTH :].contiguous())
            self.log("val_error", self.val_error)

        test_step = validation_step

    module = Measured(torch.nn.Linear(cases.WIDTH, cases.WIDTH))
    run = cases.trainer(cases.strategy(stage=3), folder, **{**cases.TRAINING, "max_epochs": 1})
    run.fit(module, **cases.loaders())
    found = [float(run.callback_metrics["error"])]
    with pytest.warns(UserWarning, match=r"hyperparameters \['part'\] are modules"):
        run.save_checkpoint(folder / "x.ckpt")
    found.append(run.test(module, cases.loader(), verbose=False)[0]["val_error"])
    module.error.clone().to("cpu")
    other = Measured(torch.nn.Linear(cases.WIDTH, cases.WIDTH))
    again = cases.trainer(cases.strategy(stage=1), folder, **cases.TRAINING)
    found.append(again.test(other, cases.loader(), ckpt_path=folder / "x.ckpt", verbose=False)[0]["val_error"])
    state = zeropp.full_state(module)
    twin = Measured(torch.nn.Linear(cases.WIDTH, cases.WIDTH))
    twin.load_state_dict(state)
    errors = [
        (twin.part(twin(batch[:, : cases.WIDTH])) - batch[:, cases.WIDTH :]).square().mean()
        for batch in cases.DataLoader(cases.Data(), 4)
    ]
    return [*found, float(sum(errors) / len(errors))]


@pytest.mark.campaign
def test_metrics_in_a_partitioned_module_keep_working(tmp_path: Path) -> None:
    """Metrics in a partitioned module keep working, and give the error that plain torch computes."""
    for found in run_ranks(2, measured, tmp_path, env=LAUNCHED, timeout=100):
        assert found[0] > 0 and found[1:3] == pytest.approx([found[3]] * 2, abs=1e-5)


def test_a_model_is_evaluated_between_trainings(tmp_path: Path) -> None:
    assert run_ranks(2, evaluated, tmp_path, env=LAUNCHED, timeout=100) == [[], []]


def exported(folder: Path) -> list[str]:
    """Export a checkpoint to a single file, and summarize, load and release a model.

    Args:
        folder: folder of the files.

    Returns:
        Descriptions of failures.
    """
    from lightning.pytorch.utilities.model_summary import summarize

    from tests.support import lightning_cases as cases
    from zeropp.integrations.lightning import convert_zero_checkpoint_to_fp32_state_dict

    wrong: list[str] = []

    def look(what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            wrong.append(f"{what}: {found}, expected {wanted}")

    run, module = cases.trained(cases.strategy(stage=3), cases.built(cases.Remembers, size=3, unit=int))
    run.save_checkpoint(folder / "x.ckpt")
    state = zeropp.full_state(module)
    sizes = summarize(module, max_depth=2)
    count = sum(value.numel() for value in state.values())
    told = sizes.total_parameters, sizes.trainable_parameters, sizes.param_nums
    look("summary", told, (count, count, [count - 8, *[72] * 4]))
    file = folder / f"one-{dist.get_rank()}.ckpt"
    made = convert_zero_checkpoint_to_fp32_state_dict(folder / "x.ckpt", file, weights_only=False)
    look("exported", max(float((made["state_dict"][name] - state[name]).abs().max()) for name in state), 0.0)
    plain = cases.Remembers.load_from_checkpoint(file, weights_only=False)
    look("hyperparameters", (dict(plain.hparams), float((plain.scale - state["scale"]).abs().max())),
         ({"size": 3, "unit": int}, 0.0))  # fmt: skip
    dist.barrier()
    for stage in (1, 3):
        with torch.serialization.safe_globals([int]):
            again = cases.trained(
                cases.strategy(stage=stage, load_full_weights=True), cases.built(), folder / "one-0.ckpt"
            )[1]
        look(f"loaded in stage {stage}", cases.distance(again, state), 0.0)
    with pytest.raises(zeropp.checkpoint.CheckpointError, match="add_safe_globals"):
        cases.trained(cases.strategy(stage=3), cases.built(), folder / "x.ckpt")
    quick = cases.trained(cases.strategy(stage=2), fast_dev_run=True, gradient_clip_val=None)[0]
    look("quick", quick.global_step, 1)
    gone = [weakref.ref(each) for each in (module, run.strategy.engine.core, run.strategy.engine.optimizer)]
    del run, module, again, sizes
    gc.collect()
    look("freed", [reference() for reference in gone], [None] * 3)
    return wrong


@pytest.mark.campaign
def test_files_for_others_a_summary_and_the_end(tmp_path: Path) -> None:
    assert run_ranks(2, exported, tmp_path, env=LAUNCHED, timeout=100) == [[], []]
    assert json.loads((tmp_path / "x.ckpt" / "checkpoint" / "metadata.json").read_text())
    assert Metadata.read(tmp_path / "x.ckpt" / "checkpoint").tensors
