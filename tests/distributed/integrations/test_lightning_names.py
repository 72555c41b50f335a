"""Strategy names in both Lightning packages, arguments with an effect on ranks, and checkpoints of DeepSpeed."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.deepspeed_files import write_deepspeed
from tests.support.rank_pool import run_ranks
from zeropp.deepspeed import checkpointing
from zeropp.integrations._lightning.classes import NAMES

LAUNCHED = {"TORCHELASTIC_RUN_ID": "tests"}


def registered() -> list[str]:
    """Return descriptions of wrong names and arguments in the package ``lightning``."""
    import inspect

    import lightning.fabric
    from lightning.fabric.strategies import DeepSpeedStrategy as OfFabric
    from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry

    from tests.support import lightning_cases as cases
    from zeropp.integrations.lightning import FabricZeroStrategy, ZeroStrategy

    wrong = []
    for ours, theirs in ((ZeroStrategy, DeepSpeedStrategy), (FabricZeroStrategy, OfFabric)):
        wanted = {name: each.default for name, each in inspect.signature(theirs.__init__).parameters.items()}
        found = {name: each.default for name, each in inspect.signature(ours.__init__).parameters.items()}
        if list(found.items()) != list(wanted.items()):
            wrong.append(f"arguments of {ours.__name__} are {found}")
    for name, given in NAMES.items():
        run = cases.trainer(name.upper())
        fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=name)
        if not (isinstance(run.strategy, ZeroStrategy) and isinstance(fabric.strategy, FabricZeroStrategy)):
            wrong.append(f"{name} is {type(run.strategy)} and {type(fabric.strategy)}")
        if run.strategy.config != ZeroStrategy(**given).config or fabric.strategy.config != run.strategy.config:
            wrong.append(f"{name} has {run.strategy.config}")
    # For each of DeepSpeed's names there must be one of zeropp.
    wrong += [each for each in StrategyRegistry if each.startswith("deepspeed") and f"zeropp{each[9:]}" not in NAMES]
    return wrong


def on_disk(folder: Path) -> list[Any]:
    """Build weights on NVMe, and in host memory, before the model is wrapped.

    Args:
        folder: folder in place of an NVMe drive.

    Returns:
        The number of elements of a weight that this rank holds before wrapping; True if files exist before wrapping
        with "nvme" only; True if the sum of the trained weights is that of a run without offload; and the log levels
        with and without ``logging_level``.
    """
    from tests.support import lightning_cases as cases

    given = {
        "remote_device": "nvme", "offload_parameters": True, "offload_params_device": "nvme", "nvme_path": str(folder),
        "offload_optimizer": True, "logging_level": logging.ERROR,
    }  # fmt: skip
    was = checkpointing.is_configured()
    cut, trained, files = cases.built_late(3, folder, **given, cpu_checkpointing=True)
    assert not was and checkpointing._process.block.cpu_checkpointing
    checkpointing._process.__init__()  # type: ignore[misc]
    level = logging.getLogger("zeropp").level
    other = folder / "other"
    other.mkdir(exist_ok=True)
    # With "cpu", weights are built in host memory and are written to files when the model is wrapped.
    _, _, others = cases.built_late(3, other, **{**given, "remote_device": "cpu", "nvme_path": str(other)})
    _, wanted, _ = cases.built_late(3)
    return [cut, files > 0 and others == 0, trained == pytest.approx(wanted), level, logging.getLogger("zeropp").level]


def test_strategy_names_give_their_settings(tmp_path: Path) -> None:
    assert run_ranks(2, registered, env=LAUNCHED, timeout=100) == [[], []]
    assert (
        run_ranks(2, on_disk, tmp_path, env=LAUNCHED, timeout=100)
        == [[36000, True, True, logging.ERROR, logging.WARNING]] * 2
    )


def in_the_other_package() -> tuple[float, str, str]:
    """Train with the package ``pytorch_lightning``.

    Returns:
        The difference of the weights from one process, the name of the strategy's module, and the error if a Trainer of
        ``lightning`` gets this strategy.
    """
    import lightning_fabric
    import pytorch_lightning

    from tests.support import lightning_cases as cases
    from zeropp.integrations.pytorch_lightning import FabricZeroStrategy, ZeroStrategy

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return (self.net(batch[:, :8]) - batch[:, 8:]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "use_distributed_sampler": False, "max_epochs": 2}  # fmt: skip
    module, plain = Module(), Module()
    run = pytorch_lightning.Trainer(strategy="zeropp_stage_3", devices=2, **quiet)
    assert isinstance(run.strategy, ZeroStrategy)
    run.fit(module, cases.loader())
    optimizer = plain.configure_optimizers()
    for _ in range(2):
        for batch in cases.DataLoader(cases.Data(), 4):
            plain.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="zeropp_stage_1")
    with pytest.raises(ValueError, match="invalid strategy") as told:
        cases.trainer(run.strategy)
    assert isinstance(fabric.strategy, FabricZeroStrategy)
    return cases.distance(module, plain.state_dict()), type(run.strategy).__module__, str(told.value)


def test_the_other_package() -> None:
    """Weights differ by less than 1e-5, because float32 sums are added in another order."""
    for distance, place, _ in run_ranks(2, in_the_other_package, env=LAUNCHED, timeout=100):
        assert distance < 1e-5 and place == "zeropp.integrations.pytorch_lightning"


def written_by_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """Train a plain module, write a checkpoint as DeepSpeed's strategy does, and return the weights."""
    from tests.support import lightning_cases as cases

    module = cases.plain(1)
    write_deepspeed(folder / "theirs.ckpt", module, module.trainer.optimizers[0], 3, 3, tag="checkpoint")
    return module.state_dict()


def read_by_us(folder: Path, wanted: dict[str, torch.Tensor]) -> tuple[float, int, int, int]:
    """Load the checkpoint of DeepSpeed's strategy, and convert it to a single file.

    Args:
        folder: folder of the checkpoint.
        wanted: weights in the checkpoint.

    Returns:
        Largest difference of the weights, the Trainer's steps, the optimizer's steps, and the epoch in the single file.
    """
    from tests.support import lightning_cases as cases
    from zeropp.integrations.lightning import convert_zero_checkpoint_to_fp32_state_dict

    with pytest.warns(UserWarning, match="position begins anew") if dist.get_rank() == 0 else nullcontext():
        run, module = cases.trained(cases.strategy(stage=2), path=folder / "theirs.ckpt", max_epochs=0)
    steps = {int(state["step"]) for state in run.strategy.engine.optimizer.state.values()}
    file = folder / f"{run.global_rank}.ckpt"
    made = convert_zero_checkpoint_to_fp32_state_dict(folder / "theirs.ckpt", file)
    gap = max(float((made["state_dict"][name] - value).abs().max()) for name, value in wanted.items())
    again = cases.Remembers.load_from_checkpoint(file)
    gap = max(gap, float((again.net[1].weight - wanted["net.1.weight"]).abs().max()))
    return max(gap, cases.distance(module, wanted)), run.global_step, max(steps), made["epoch"]


def test_a_folder_of_deepspeed_s_strategy(tmp_path: Path) -> None:
    (wanted,) = run_ranks(1, written_by_deepspeed, tmp_path, timeout=100)
    for found in run_ranks(2, read_by_us, tmp_path, wanted, env=LAUNCHED, timeout=100):
        # One process trained ten batches in each of two epochs, two batches per step, so the optimizer has taken 10
        # steps. Lightning's own position is not loaded.
        assert found == (0.0, 0, 10, 0)


@pytest.mark.campaign
def test_importing_zeropp_imports_no_trainer() -> None:
    import subprocess
    import sys

    code = "import sys, zeropp, zeropp.integrations; print([n for n in sys.modules if 'lightning' in n.split('.')[0]])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
