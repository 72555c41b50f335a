"""A small GPT trained by Lightning's Trainer and sharded by zeropp.

    torchrun --standalone --nproc-per-node 2 examples/lightning_gpt.py
    python examples/lightning_gpt.py --devices 2                       # Lightning starts the second process
    torchrun --standalone --nproc-per-node 2 examples/lightning_gpt.py --folder runs/lightning --resume --epochs 2

The model learns the text of this repository's licence, byte by byte. The script saves a checkpoint after each epoch,
and writes one file with the full weights at the end. ``--strategy ddp`` trains the same model without zeropp.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from text_data import Windows
from torch import Tensor
from torch.utils.data import DataLoader

# This import registers the strategy names "zeropp", "zeropp_stage_3" and others.
import zeropp.integrations.lightning

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"


class LanguageModel(L.LightningModule):
    """LightningModule that builds its GPT in `configure_model`, where stage 3 shards each module as it is built."""

    def __init__(self, layers: int = 3, width: int = 64, heads: int = 4, length: int = 64, rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        # Lightning calls this method before each fit, validate and test, so build the model only once.
        if self.gpt is None:
            own = self.hparams
            self.gpt = GPT(GPTConfig(layers=own.layers, d_model=own.width, heads=own.heads, seq_len=own.length))

    def forward(self, windows: Tensor) -> Tensor:
        assert self.gpt is not None
        logits = self.gpt(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate, weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT by Lightning.")
    parser.add_argument("--strategy", default="zeropp_stage_3")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "2")))
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--windows", type=int, default=256, help="windows per epoch, over all ranks")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    L.seed_everything(0, verbose=False)
    model = LanguageModel()
    length = model.hparams.length
    saves = ModelCheckpoint(args.folder, monitor="val_loss", save_last=True)
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=CSVLogger(args.folder, name="log"),
        callbacks=[saves, LearningRateMonitor()],
    )
    trainer.fit(
        model,
        DataLoader(Windows(TEXT, length, args.windows, seed=0), batch_size=8, shuffle=True),
        DataLoader(Windows(TEXT, length, 32, seed=1), batch_size=8),
        ckpt_path="last" if args.resume else None,
    )
    whole = args.folder / "whole.ckpt"
    if trainer.is_global_zero:
        # zeropp's checkpoint is a folder of shards. This call makes one file that LightningModule can load.
        if args.strategy.startswith("zeropp"):
            zeropp.integrations.lightning.convert_zero_checkpoint_to_fp32_state_dict(saves.last_model_path, whole)
        loss = float(trainer.callback_metrics["val_loss"])
        print(f"step {trainer.global_step}: validation loss {loss:.4f}; {saves.last_model_path}", flush=True)


if __name__ == "__main__":
    main()
