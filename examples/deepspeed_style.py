"""A training loop with DeepSpeed's API. The same script runs on zeropp and on DeepSpeed.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed_style.py
    torchrun --standalone --nproc-per-node 2 examples/deepspeed_style.py --engine deepspeed  # if DeepSpeed is installed
    torchrun --standalone --nproc-per-node 2 examples/deepspeed_style.py --config zero2.json --save runs/style

A small GPT learns the text of this repository's licence, byte by byte. The script prints the loss of each step,
averaged over ranks and micro-batches. ``--losses`` writes all losses to a file as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from text_data import Windows
from torch import Tensor, nn

TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
MODEL = GPTConfig(layers=3, d_model=64, heads=4, seq_len=64)

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 100, "warmup_max_lr": 3e-3, "warmup_num_steps": 10, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
}


class WithLoss(nn.Module):
    """A GPT whose forward returns the loss, so that one call of the engine runs both."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(MODEL)

    def forward(self, windows: Tensor) -> Tensor:
        logits = self.gpt(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT with DeepSpeed's API.")
    parser.add_argument("--engine", default="zeropp", choices=("zeropp", "deepspeed"))
    parser.add_argument("--config", type=Path, help="DeepSpeed's JSON; default: stage 3, two micro-batches per step")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage; replaces the configuration's stage")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save a checkpoint at the end")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="load the newest checkpoint of this folder first")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write losses as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers; not used")
    return parser.parse_args(argv)


def mean(loss: Tensor, device: torch.device) -> float:
    """Return the loss averaged over all ranks."""
    value = loss.detach().clone().to(device)
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def train(args: argparse.Namespace) -> list[float]:
    # Both libraries have initialize() with the same arguments and results.
    library = importlib.import_module(args.engine)
    config = json.loads(args.config.read_text()) if args.config else CONFIG
    if args.stage is not None:
        config = {**config, "zero_optimization": {**config["zero_optimization"], "stage": args.stage}}
    # The same seed on every rank gives all ranks the same initial weights.
    torch.manual_seed(0)
    model = WithLoss()
    engine, _, loader, _ = library.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Windows(args.text, MODEL.seq_len),
        config=config,
    )
    if args.resume:
        engine.load_checkpoint(args.resume)
    losses: list[float] = []
    batches = iter(loader)
    while engine.global_steps < args.steps:
        total = 0.0
        # An optimizer step consists of gradient_accumulation_steps micro-batches. engine.step() is called for each of
        # them, but only steps the optimizer after the last one. engine.backward() divides the loss by their number.
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(next(batches).to(engine.device))
            engine.backward(loss)
            engine.step()
            total += mean(loss, engine.device)
        losses.append(total / engine.gradient_accumulation_steps())
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {losses[-1]:.6f}, rate {engine.get_lr()[0]:.2e}", flush=True)
    if args.save:
        engine.save_checkpoint(args.save)
    if args.losses and engine.global_rank == 0:
        args.losses.write_text(json.dumps(losses))
    return losses


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
