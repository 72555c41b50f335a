"""A LightningModule, its data, and Trainers with and without zeropp; for ranks, since to import it takes seconds."""

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
# Five batches of two on each of two ranks: windows of two leave one batch over.
TRAINING: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


class Data(Dataset[Tensor]):
    """Inputs and targets side by side, always the same."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.rows = torch.randn(samples, 2 * WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Module(pl.LightningModule):
    """Blocks that are partitioned, a parameter of its own, and a record of what was seen."""

    def __init__(self, *, late: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.frozen, self.net = frozen, None
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seen: dict[str, Any] = {"losses": [], "rates": [], "val": [], "dtypes": set(), "starts": []}
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.net is None:
            # Not in the constructor's time: with zeropp this is where it is built in pieces.
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
    """A module with other weights on each rank."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return kind(**given)


def strategy(**given: Any) -> Any:
    """Ours, with all of the model partitioned, and so small that a test may wait for what goes wrong."""
    made = ZeroStrategy(**given)
    if given.get("zero_optimization", True) and given.get("config") is None:
        made.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        made.config["zeropp"] = {"unit_min_blocks": 0, "hang_timeout": 20}
    return made


def trainer(chosen: Any, folder: Any = None, **more: Any) -> Any:
    """A Trainer that says nothing and writes nothing, unless it is told to."""
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "use_distributed_sampler": False, "accelerator": "cpu", "default_root_dir": folder,
    }  # fmt: skip
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return pl.Trainer(**{"strategy": chosen, "devices": devices, **quiet, **more})


def loader(batch: int = 2) -> DataLoader[Tensor]:
    """Gives this rank's samples; what all ranks get together is what one process gets in larger batches."""
    data = Data()
    # Lightning's own would shuffle for training.
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return DataLoader(data, batch, sampler=DistributedSampler(data, world, rank, shuffle=False))


def loaders(batch: int = 2) -> dict[str, Any]:
    """For ``fit``."""
    return {"train_dataloaders": loader(batch), "val_dataloaders": loader(batch)}


def plain(world: int, kind: type[Module] = Module, given: Any = None, **more: Any) -> Module:
    """The same in one process, without zeropp, on the batches of all ranks."""
    module = built(kind, **(given or {}))
    trainer("auto", **{**TRAINING, **more}).fit(module, **loaders(2 * world))
    return module


def trained(chosen: Any, module: Module | None = None, path: Any = None, **more: Any) -> tuple[Any, Module]:
    """A Trainer that has fitted a module with zeropp, and the module."""
    module = built() if module is None else module
    run = trainer(chosen, **{**TRAINING, **more})
    run.fit(module, **loaders(), ckpt_path=path)
    return run, module


def built_late(stage: int, folder: Any = None, **given: Any) -> tuple[int | None, float, int]:
    """What becomes of a model that is built in ``configure_model``.

    Returns:
        Elements that this rank has of a weight before the model is wrapped; the sum of trained weights; open
        files in a folder before it is.
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
    """The largest difference to whole weights. Collective."""
    found = zeropp.full_state(module)
    assert found.keys() == wanted.keys()
    return max(float((value - wanted[name]).abs().max()) for name, value in found.items())


class ClipsByHand(Module):
    """Clips in a hook of its own, every other step."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, 0.3, "norm")


class BackwardByHand(Module):
    """Its backward is another one than Lightning's."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * self.global_step).backward(*args, **kwargs)


class Manual(Module):
    """Owns its steps: two of three batches, the second of which has both gradients; clips and schedules itself."""

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


# For modules that step by themselves.
OWN: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
# A module, and what its Trainer is told besides; callbacks are made where they are used, since they keep a state.
HOOKS: dict[str, tuple[type[Module], dict[str, Any]]] = {
    "clips by hand": (ClipsByHand, {"gradient_clip_val": None}),
    "backward by hand": (BackwardByHand, {}),
    "manual": (Manual, OWN),
    "windows that grow": (Module, {"accumulate_grad_batches": 1, "callbacks": True}),
}


class Wide(Module):
    """Has a layer that is large enough to be built in pieces."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.wide = nn.Linear(WIDTH, 9000)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wide(x).mean(-1, keepdim=True)


class Skips(Module):
    """Gives no loss."""

    def training_step(self, batch: Tensor, index: int) -> Any:
        return None


class Fails(Module):
    """One rank fails in its third step."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 2 and dist.get_rank() == 1:
            raise ZeroDivisionError("the third batch")
        return super().training_step(batch, index)


class TwoOptimizers(Module):
    """Has one for each half."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.count, self.automatic_optimization = count, False

    def configure_optimizers(self) -> Any:
        kinds = (torch.optim.SGD, torch.optim.Adam)[: self.count]
        return [kind(list(self.net[i].parameters()), lr=0.1) for i, kind in enumerate(kinds)] or None


class Remembers(Module):
    """Has hyperparameters, of which one is a class."""

    def __init__(self, size: int = 1, unit: type = str) -> None:
        super().__init__()
        self.save_hyperparameters()
