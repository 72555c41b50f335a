"""Lightning's Trainer with zeropp's strategy on two ranks gives the results of a Trainer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zeropp
from tests.support.rank_pool import run_ranks, some
from zeropp.checkpoint import CheckpointError

# Lightning takes this variable as a sign that torchrun started the processes. Without it, Lightning would start
# processes of its own.
LAUNCHED = {"TORCHELASTIC_RUN_ID": "tests"}


def alone() -> dict[str, Any]:
    """Train in one process without zeropp, and return the weights and the recorded losses and learning rates."""
    from tests.support import lightning_cases as cases

    module = cases.plain(2)
    return {"state": module.state_dict(), **module.seen}


def stages(wanted: dict[str, Any], which: list[int]) -> dict[int, list[Any]]:
    """Train in several ZeRO stages.

    Args:
        wanted: result of :func:`alone`.
        which: the stages; 0 for no partitioning.

    Returns:
        For each stage, the difference of the weights, the elements of this rank's shards, the learning rates, the
        training losses and the validation losses.
    """
    from tests.support import lightning_cases as cases

    found = {}
    for stage in which:
        given = {"stage": stage} if stage else {"zero_optimization": False}
        run, module = cases.trained(cases.strategy(**given))
        engine = run.strategy.engine
        assert engine.zero_optimization_stage() == stage and run.global_step == engine.global_steps == 6
        assert engine.config["gradient_accumulation_steps"] == 2 and engine.train_batch_size() == 8
        assert engine.global_samples == 40
        own = sum(buffer.shard.numel() for buffer in engine.core.trainable_buffers)
        seen = [module.seen[key] for key in ("rates", "losses", "val")]
        found[stage] = [cases.distance(module, wanted["state"]), own, *seen]
    return found


@pytest.mark.parametrize("which", some([[0, 3], [0, 1, 2]], 2), ids=str)
def test_stages_equal_a_trainer_in_one_process(which: list[int]) -> None:
    """Weights and losses of about 1 agree within 1e-5, because float32 sums are added in another order.

    Training uses windows of two batches (the last of five batches is a window of its own), clipping, a schedule by
    steps, and validation. The ranks start with different weights, and rank 0's are used.
    """
    (wanted,) = run_ranks(1, alone)
    first, second = run_ranks(2, stages, wanted, which, env=LAUNCHED, timeout=100)
    for stage in which:
        for distance, own, rates, *_ in (first[stage], second[stage]):
            assert distance < 1e-5 and rates == wanted["rates"] and len(set(rates)) == 3
            # Above stage 0 each rank has half of the elements, with padding to multiples of 256.
            assert (own == first[0][1]) if stage == 0 else (own <= first[0][1] / 2)
        for number, key in enumerate(("losses", "val"), 3):
            both = [sum(pair) / 2 for pair in zip(first[stage][number], second[stage][number], strict=True)]
            assert both == pytest.approx(wanted[key], abs=1e-5)


def callbacks(folder: Path, name: str, kept: dict[str, Any]) -> list[Any]:
    """Return the callbacks of a run.

    The run named "whole" also saves a checkpoint in the middle of an accumulation window, and its weights alone.

    Args:
        folder: folder of the checkpoints.
        name: name of the run.
        kept: dict that receives the full weights at the save in the window.
    """
    from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint

    class Middle(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            # The third of five batches is the first of a window of two, so gradients are accumulated.
            if trainer.fit_loop.epoch_loop.batch_progress.total.ready == 3:
                trainer.save_checkpoint(folder / "middle.ckpt")
                trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
                kept.update(zeropp.full_state(module))

    saves = ModelCheckpoint(folder / name, monitor="val_loss", save_last=True, save_top_k=1)
    return [saves, EarlyStopping("val_loss", patience=9), LearningRateMonitor(), *([Middle()] * (name == "whole"))]


def interrupted(folder: Path) -> list[float]:
    """Train two epochs at once, and one epoch and then another one after a load.

    Args:
        folder: folder of the checkpoints.

    Returns:
        Three differences of weights: between the two runs, of stage 1 after loading the second run's checkpoint, and of
        stage 1 after loading the checkpoint that was saved inside a window.
    """
    from lightning.pytorch.loggers import CSVLogger

    from tests.support import lightning_cases as cases

    found: list[Any] = []
    kept: dict[str, Any] = {}
    for name, epochs in (("whole", (2,)), ("parts", (1, 2))):
        for until in epochs:
            run, module = cases.trained(
                cases.strategy(stage=3), max_epochs=until, callbacks=callbacks(folder, name, kept), path="last",
                logger=CSVLogger(folder / name, version=until), enable_checkpointing=True, log_every_n_steps=1,
            )  # fmt: skip
        found.append((zeropp.full_state(module), module.seen["val"][-5:], module.seen["rates"][-3:], run.global_step))
    (whole, *others), (parts, *again) = found
    assert others == again and others[-1] == 6
    assert (folder / "parts" / "last.ckpt" / "checkpoint").is_dir()
    assert "lr-AdamW" in (folder / "whole" / "lightning_logs" / "version_2" / "metrics.csv").read_text()
    distances = [max(float((whole[name] - parts[name]).abs().max()) for name in whole)]
    for path, wanted in ((folder / "parts" / "last.ckpt", parts), (folder / "middle.ckpt", kept)):
        # The loaded step has reached max_steps, so the run only loads.
        run, module = cases.trained(cases.strategy(stage=1), max_epochs=2, max_steps=1, path=path)
        distances.append(cases.distance(module, wanted))
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        cases.trained(cases.strategy(stage=1), path=folder / "weights.ckpt")
    return distances


def test_resuming_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """A resumed run has the same bits on the same ranks.

    A save inside a window changes nothing, and another stage can load the checkpoint.
    """
    assert run_ranks(2, interrupted, tmp_path, env=LAUNCHED, timeout=100) == [[0.0, 0.0, 0.0]] * 2
