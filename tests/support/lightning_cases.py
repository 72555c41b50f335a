"""A LightningModule, its data, and Trainers with and without zeropp.

The ranks import this file, because importing Lightning takes seconds.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import zeropp
from tests.support.disk_faults import open_files
from zeropp.integrations.lightning import ZeroStrategy
from zeropp.params.sharded_build import piece_of

WIDTH, SAMPLES = 8, 20
# Each of two ranks has five batches of two samples, so accumulation windows of two leave one batch over.
TRAINING: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


class Data(Dataset[Tensor]):
    """Inputs and targets side by side in one row; the same numbers every time."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.rows = torch.randn(samples, 2 * WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Module(pl.LightningModule):
    """Partitioned blocks, a parameter of the root, and a record of losses, rates and dtypes."""

    def __init__(self, *, late: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.frozen, self.net = frozen, None
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seen: dict[str, Any] = {"losses": [], "rates": [], "val": [], "dtypes": set(), "starts": []}
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            # Build here, not in the constructor: zeropp builds the layers in pieces during ``configure_model``.
            self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            self.net[0].requires_grad_(not self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        for layer in self.net:
            x = x + torch.tanh(layer(x))
        return x * self.scale

    def loss(self, batch: Tensor) -> Tensor:
        self.seen["dtypes"].add((batch.dtype, self.net[1].weight.dtype))
        return (self(batch[:, :WIDTH]) - batch[:, WIDTH:]).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        self.seen["losses"].append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.seen["val"].append(loss.item())

    test_step = validation_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch[:, :WIDTH])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["rates"].append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def built(kind: type[Module] = Module, **given: Any) -> Module:
    """Return a module with different weights on each rank."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return kind(**given)


def strategy(**given: Any) -> Any:
    """Return zeropp's strategy with a fully partitioned model and a short hang timeout."""
    made = ZeroStrategy(**given)
    if given.get("zero_optimization", True) and given.get("config") is None:
        made.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        made.config["zeropp"] = {"unit_min_blocks": 0, "hang_timeout": 20}
    return made


def trainer(chosen: Any, folder: Any = None, **more: Any) -> Any:
    """Return a Trainer without output and files, unless ``more`` changes that."""
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "use_distributed_sampler": False, "accelerator": "cpu", "default_root_dir": folder,
    }  # fmt: skip
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(**{"strategy": chosen, "devices": devices, **quiet, **more})


def loader(batch: int = 2) -> DataLoader[Tensor]:
    """Return a loader of this rank's samples.

    Together, the batches of all ranks equal the larger batches of one process.
    """
    data = Data()
    # Lightning's own sampler would shuffle the training data.
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return DataLoader(data, batch, sampler=DistributedSampler(data, world, rank, shuffle=False))


def loaders(batch: int = 2) -> dict[str, Any]:
    """Return the loader arguments of ``fit``."""
    return {"train_dataloaders": loader(batch), "val_dataloaders": loader(batch)}


def plain(world: int, kind: type[Module] = Module, given: Any = None, **more: Any) -> Module:
    """Train the module in one process without zeropp on the batches of all ranks, and return the module."""
    module = built(kind, **(given or {}))
    trainer("auto", **{**TRAINING, **more}).fit(module, **loaders(2 * world))
    return module


def trained(chosen: Any, module: Module | None = None, path: Any = None, **more: Any) -> tuple[Any, Module]:
    """Fit a module with zeropp, and return the Trainer and the module."""
    module = built() if module is None else module
    run = trainer(chosen, **{**TRAINING, **more})
    run.fit(module, **loaders(), ckpt_path=path)
    return run, module


def built_late(stage: int, folder: Any = None, **given: Any) -> tuple[int | None, float, int]:
    """Train a model that is built in ``configure_model``.

    Returns:
        The number of elements of a large weight that this rank holds before wrapping, or None if the weight is whole;
        the sum of trained weights; and the number of open files in ``folder`` before wrapping.
    """
    chosen, rows, files = strategy(stage=stage, **given), [], []
    setup = chosen.setup

    def look(run: Any) -> None:
        piece = piece_of(run.lightning_module.wide.weight)
        rows.append(None if piece is None or piece.row is None else piece.row.numel())
        files.append(0 if folder is None else open_files(folder))
        setup(run)

    chosen.setup = look
    module = trained(chosen, built(Wide, late=True), max_epochs=1)[1]
    return rows[0], sum(float(value.double().sum()) for value in zeropp.full_state(module).values()), files[0]


def distance(module: nn.Module, wanted: dict[str, Tensor]) -> float:
    """Return the largest difference from the given full weights. Collective."""
    found = zeropp.full_state(module)
    assert found.keys() == wanted.keys()
    return max(float((value - wanted[name]).abs().max()) for name, value in found.items())


class ClipsByHand(Module):
    """A module that clips gradients in its own hook at every other step."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, 0.3, "norm")


class BackwardByHand(Module):
    """A module with its own backward."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * self.global_step).backward(*args, **kwargs)


class Manual(Module):
    """A module with manual optimization, clipping and scheduling.

    The module steps on two of three batches. The first of these steps uses the gradients of two batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.manual_backward(self.loss(batch))
        if index % 3:
            self.clip_gradients(optimizer, 0.7, "norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


# Trainer arguments for modules with manual optimization.
OWN: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
# Modules and their Trainer arguments. Callbacks have state, so tests create them where they are used.
HOOKS: dict[str, tuple[type[Module], dict[str, Any]]] = {
    "clips by hand": (ClipsByHand, {"gradient_clip_val": None}),
    "backward by hand": (BackwardByHand, {}),
    "manual": (Manual, OWN),
    "windows that grow": (Module, {"accumulate_grad_batches": 1, "callbacks": True}),
}


class Wide(Module):
    """A module with a layer that is large enough to be built in pieces."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.wide = nn.Linear(WIDTH, 9000)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wide(x).mean(-1, keepdim=True)


class Skips(Module):
    """A module whose training step returns no loss."""

    def training_step(self, batch: Tensor, index: int) -> Any:
        return None


class Fails(Module):
    """A module whose third training step fails on rank 1."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 2 and dist.get_rank() == 1:
            raise ZeroDivisionError("the third batch")
        return super().training_step(batch, index)


class TwoOptimizers(Module):
    """A module with two optimizers, for one layer each, and manual optimization."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.count, self.automatic_optimization = count, False

    def configure_optimizers(self) -> Any:
        kinds = (torch.optim.SGD, torch.optim.Adam)[: self.count]
        return [kind(list(self.net[i].parameters()), lr=0.1) for i, kind in enumerate(kinds)] or None


class Remembers(Module):
    """A module with hyperparameters, one of which is a class."""

    def __init__(self, size: int = 1, unit: type = str) -> None:
        super().__init__()
        self.save_hyperparameters()
