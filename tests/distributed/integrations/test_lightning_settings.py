"""Settings of a Trainer with zeropp's strategy: precisions, configurations, hooks of the user, and refused settings."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.rank_pool import RankFailure, run_ranks, some
from zeropp.checkpoint.metadata import Metadata

LAUNCHED = {"TORCHELASTIC_RUN_ID": "tests"}
PRECISIONS = {
    "32-true": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}
CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
    "zeropp": {"unit_min_blocks": 0},
}


def precisions(names: list[str]) -> list[str]:
    """Train in each of these precisions, and return descriptions of failures."""
    from tests.support import lightning_cases as cases
    from zeropp.integrations.lightning import ZeroPrecision

    wrong = []
    for name in names:
        dtype = PRECISIONS[name]
        # Give the precision as a plugin: if it is given by name, Lightning replaces float16 on a CPU by bfloat16.
        given = {"precision_plugin": ZeroPrecision(name), "initial_scale_power": 4, "loss_scale_window": 3}
        module = cases.built()
        begins = module.net[1].weight.detach().clone()
        run, module = cases.trained(cases.strategy(stage=3, **given), module, max_epochs=6)
        engine, seen = run.strategy.engine, module.seen
        if seen["dtypes"] != {(dtype, dtype)}:
            wrong.append(f"{name}: batch and weights were {seen['dtypes']}")
        if any(buffer.shard.dtype != torch.float32 for buffer in engine.core.trainable_buffers):
            wrong.append(f"{name}: main weights are not in float32")
        if not sum(seen["losses"][-5:]) < 0.9 * sum(seen["losses"][:5]):
            wrong.append(f"{name}: losses are {seen['losses']}")
        # The loss scale doubles at every third step after the first.
        scale, steps = engine.optimizer.loss_scale, engine.global_steps
        if scale != (1.0 if dtype != torch.float16 else 2.0 ** (4 + (steps - 1) // 3)):
            wrong.append(f"{name}: the loss scale is {scale} after {steps} steps")
        fresh = cases.built()
        cases.trained(cases.strategy(stage=3, **given), fresh, max_epochs=0)
        start = zeropp.full_state(fresh)["net.1.weight"]
        rounded = begins.to(dtype).float() if name.endswith("true") else begins
        # All ranks start with rank 0's values.
        if torch.equal(start, rounded) != (dist.get_rank() == 0):
            wrong.append(f"{name}: weights do not begin with those of rank 0")
    return wrong


@pytest.mark.parametrize("names", some([["16-mixed"], [*PRECISIONS]], 2), ids=str)
def test_every_precision_trains(names: list[str]) -> None:
    assert run_ranks(2, precisions, names, env=LAUNCHED, timeout=100) == [[], []]


HOOKS = ["clips by hand", "backward by hand", "manual", "windows that grow"]


def hooked(wanted: dict[str, Any]) -> dict[str, float]:
    """Train with hooks and callbacks of the user.

    Args:
        wanted: results of :func:`hooks_alone`.

    Returns:
        For each name, the difference of the weights from one process.
    """
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from tests.support import lightning_cases as cases

    found = {}
    for name, (state, _) in wanted.items():
        kind, more = cases.HOOKS[name]
        if more.get("callbacks"):
            more = {**more, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
        module = cases.trained(cases.strategy(stage=3), cases.built(kind), **more)[1]
        found[name] = cases.distance(module, state)
    return found


def hooks_alone(names: list[str]) -> dict[str, Any]:
    """Train with hooks and callbacks in one process without zeropp, and return the weights and losses by name."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from tests.support import lightning_cases as cases

    found = {}
    for name in names:
        kind, more = cases.HOOKS[name]
        if more.get("callbacks"):
            more = {**more, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
        module = cases.plain(2, kind, **more)
        found[name] = module.state_dict(), module.seen["losses"]
    return found


@pytest.mark.parametrize("names", some([HOOKS[2:3], HOOKS], 2), ids=str)
def test_hooks_act_as_in_one_process(names: list[str]) -> None:
    """Weights differ by less than 1e-5, because float32 sums are added in another order."""
    (wanted,) = run_ranks(1, hooks_alone, names)
    states = [state["net.1.weight"] for state, _ in wanted.values()]
    # Each case must have an effect, so no two may end with the same weights.
    assert all(float((a - b).abs().max()) > 1e-3 for i, a in enumerate(states) for b in states[:i])
    for found in run_ranks(2, hooked, wanted, env=LAUNCHED, timeout=100):
        assert max(found.values()) < 1e-5, found


def configured(folder: Path, every: bool) -> list[str]:
    """Train with a configuration as a dict, as a file, and from the environment.

    Args:
        folder: folder of the file.
        every: True for all sources; False for the dict and the environment only.

    Returns:
        Descriptions of failures.
    """
    from tests.support import lightning_cases as cases

    wrong, given = [], copy.deepcopy(CONFIG)
    path = folder / f"{dist.get_rank()}.json"
    path.write_text("// as in DeepSpeed's own examples\n" + json.dumps(CONFIG))
    states = []
    for source in (given, path, str(path), None)[:: 1 if every else 3]:
        if source is None:
            os.environ["PL_DEEPSPEED_CONFIG_PATH"] = str(path)
        # The configuration replaces all other arguments.
        run, module = cases.trained(cases.strategy(config=source, stage=1, loss_scale=7.0))
        if not source and run.strategy.engine.zero_optimization_stage() != 3:
            wrong.append("the environment's was not read")
        states.append(zeropp.full_state(module))
        # Lightning steps the scheduler once per step. If the engine did so, too, rates would grow twice as fast.
        if module.seen["rates"] != pytest.approx([0, 0, 0.0125, 0.025, 0.0375, 0.05]):
            wrong.append(f"{source}: rates were {module.seen['rates']}")
        wrong += [f"{source}: {name}" for name, value in states[-1].items() if not torch.equal(value, states[0][name])]
    if given != CONFIG:
        wrong.append(f"the user's dict is {given} now")
    return wrong


@pytest.mark.parametrize("every", some([False, True], 2))
def test_configurations(every: bool, tmp_path: Path) -> None:
    assert run_ranks(2, configured, tmp_path, every, env=LAUNCHED, timeout=100) == [[], []]


def models(folder: Path) -> list[Any]:
    """Save a model with frozen weights, and build a model in ``configure_model``.

    Args:
        folder: folder of the checkpoint.

    Returns:
        Names of frozen weights in the checkpoint; a frozen weight; the difference of a trained weight after loading;
        for a weight built in ``configure_model``, the number of elements that this rank holds before wrapping (in stage
        3, then in stage 2; None if the weight is whole); and True if the sums of all trained weights agree.
    """
    from tests.support import lightning_cases as cases

    run, module = cases.trained(cases.strategy(stage=3, exclude_frozen_parameters=True), cases.built(frozen=True))
    run.save_checkpoint(folder / "some.ckpt")
    saved = Metadata.read(folder / "some.ckpt" / "checkpoint").tensors
    frozen = {name for name in saved if name.startswith("model.net.0")}
    state = zeropp.full_state(module)
    again = cases.trained(cases.strategy(stage=2), cases.built(frozen=True), folder / "some.ckpt")[1]
    moved = float((zeropp.full_state(again)["net.1.weight"] - state["net.1.weight"]).abs().max())
    (cut, sum_cut, _), (whole, sum_whole, _) = cases.built_late(3), cases.built_late(2)
    return [frozen, state["net.0.weight"], moved, cut, whole, sum_cut == pytest.approx(sum_whole)]


@pytest.mark.campaign
def test_frozen_and_late_models(tmp_path: Path) -> None:
    """Frozen weights have rank 0's values, and no checkpoint has them. Stage 3 builds a late weight in pieces."""
    begins = run_ranks(1, frozen_begins)[0]
    first, second = run_ranks(2, models, tmp_path, env=LAUNCHED, timeout=100)
    for found in (first, second):
        assert found[0] == set() and torch.equal(found[1], begins)
        assert found[2:] == [0.0, 9000 * 8 // 2, None, True]


def frozen_begins() -> torch.Tensor:
    """Return the initial value of the frozen weight on rank 0."""
    from tests.support import lightning_cases as cases

    weight: torch.Tensor = cases.built().net[0].weight.detach()
    return weight


def refused(folder: Path) -> dict[str, str]:
    """Return the error message of each refused setting or call, or "nothing" if there is none."""
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
    from lightning.pytorch.strategies import DDPStrategy

    from tests.support import lightning_cases as cases
    from zeropp.integrations.lightning import ZeroPrecision

    class Other(ZeroPrecision.__mro__[2]):  # type: ignore[misc]
        """A precision plugin of the user."""

    class Thaws(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)

    (folder / "file.ckpt").write_bytes(b"")
    (folder / "folder.ckpt").mkdir(exist_ok=True)
    once = {"max_epochs": 1}
    calls: dict[str, Any] = {
        "two optimizers": lambda: cases.trained(cases.strategy(), cases.TwoOptimizers(), **cases.OWN),
        "no optimizer": lambda: cases.trained(cases.strategy(), cases.TwoOptimizers(0), **cases.OWN),
        "by value": lambda: cases.trained(cases.strategy(), gradient_clip_algorithm="value"),
        "windows twice": lambda: cases.trained(cases.strategy(config={"gradient_accumulation_steps": 2})),
        "clipped twice": lambda: cases.trained(cases.strategy(config={"gradient_clipping": 2.0})),
        "schedulers twice": lambda: cases.trained(cases.strategy(config={"scheduler": CONFIG["scheduler"]})),
        "finetuning": lambda: cases.trained(cases.strategy(), callbacks=[Thaws()]),
        "averaging": lambda: cases.trained(cases.strategy(), callbacks=[StochasticWeightAveraging(swa_lrs=0.1)]),
        "no loss": lambda: cases.trained(cases.strategy(), cases.built(cases.Skips)),
        "no such file": lambda: cases.strategy(config=folder / "missing.json"),
        "a number": lambda: cases.strategy(config=3),
        "double": lambda: cases.trainer(cases.strategy(), precision="64-true"),
        "plugin": lambda: cases.strategy(precision_plugin=Other()),
        "a file": lambda: cases.trained(cases.strategy(), path=folder / "file.ckpt", **once),
        "a folder": lambda: cases.trained(cases.strategy(), path=folder / "folder.ckpt", **once),
        "a URL": lambda: cases.trained(cases.strategy(), **once)[0].save_checkpoint("s3://bucket/x.ckpt"),
        "options": lambda: cases.trained(cases.strategy(), **once)[0].save_checkpoint(folder / "x", storage_options=1),
    }
    assert not issubclass(DDPStrategy, type(cases.strategy()))
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


REFUSED = {
    "two optimizers": "configure_optimizers gave 2 optimizers (SGD, Adam)",
    "no optimizer": "configure_optimizers gave no optimizer with parameters",
    "by value": "gradient_clip_algorithm is 'value'",
    "windows twice": "gradient_accumulation_steps is in the strategy's config",
    "clipped twice": "gradient_clipping is 2.0 in the strategy's config, and Trainer(gradient_clip_val=0.5)",
    "schedulers twice": "there is a scheduler in the strategy's config, and one of configure_optimizers",
    "finetuning": "callbacks that derive from BaseFinetuning look for the model's parameters",
    "averaging": "StochasticWeightAveraging and WeightAveraging copy a whole model's weights",
    "no loss": "returning None in distributed training is not supported",
    "no such file": "missing.json', and no such file is there",
    "a number": "config is a int; expected a dict or the path",
    "double": "precision is '64-true'; with zeropp it is one of 32-true, 16-mixed",
    "plugin": "the precision plugin is a refused.<locals>.Other",
    "a file": "is a single file; give the strategy load_full_weights=True",
    "a folder": "is no checkpoint of a Trainer with this strategy",
    "a URL": "'s3://bucket/x.ckpt' is a URL",
    "options": "storage_options are not used",
}


def test_unsupported_trainer_settings_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(2, refused, tmp_path, env=LAUNCHED, timeout=100):
        assert found.keys() == REFUSED.keys()
        assert {name: told for name, told in found.items() if REFUSED[name] not in told} == {}


def fails_on_one() -> None:
    """Train a module whose training step fails on rank 1."""
    from tests.support import lightning_cases as cases

    cases.trained(cases.strategy(stage=3), cases.built(cases.Fails))


def test_an_error_on_one_rank_ends_the_others() -> None:
    first, second = run_ranks(2, fails_on_one, env=LAUNCHED, catch=True, timeout=60)
    assert isinstance(second, RankFailure) and second.type_name == "ZeroDivisionError"
    assert isinstance(first, RankFailure), first
