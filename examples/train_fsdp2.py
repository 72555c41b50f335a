"""Train the small GPT with PyTorch's FSDP2, with communication quantized by zeropp.

    torchrun --nproc-per-node 4 examples/train_fsdp2.py                      # int8 weights, int8 and int4 gradients
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --plain              # FSDP2 without zeropp
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --ranks-per-node 2   # pretend that two ranks share a node

The script prints losses, and at the end the bytes that rank 0 has sent. It runs on CUDA devices (NCCL) or on CPUs
(gloo). With --plain it prints no bytes, because FSDP2's own collectives are not counted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from job import INTERRUPTED, Job, start_job
from text_data import Batches, load_text, on_device
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zeropp import fsdp2


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with FSDP2 and quantized communication.")
    parser.add_argument("--plain", action="store_true", help="FSDP2 without quantized communication")
    parser.add_argument("--feedback", choices=["cross", "both"], help="error feedback of quantized gradients (LoCo)")
    parser.add_argument("--ranks-per-node", type=int, help="default: torchrun's LOCAL_WORLD_SIZE")
    parser.add_argument("--reshard", type=int, help="number of ranks that share a copy of the weights until backward")
    parser.add_argument("--bf16", action="store_true", help="compute and gather in bf16, reduce in fp32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="files; default: Python's standard library")
    return parser.parse_args(argv)


def shard(model: GPT, args: argparse.Namespace) -> nn.Module:
    """Apply FSDP2 to every block and then to the whole model, so that each block is gathered by itself."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {"mp_policy": policy} if args.bf16 else {}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=args.reshard or True, **settings)
    return fully_shard(model, **settings)


def train(model: nn.Module, job: Job, args: argparse.Namespace) -> bool:
    """Run all steps, and return True; return False if any rank gets a signal to stop before the end."""
    batches = Batches(load_text(args.data).train, args.batch, args.seq_len, job.rank, job.world, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, args.steps + 1):
        loss = model(*on_device(batches.at(step), job.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stop, mean = job.agree(loss.item())
        if job.rank == 0 and (step % args.log_every == 0 or step in (1, args.steps)):
            print(f"step {step}: loss {mean:.4f}", flush=True)
        if stop:
            return False
    return True


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with start_job(plain=False) as job:
        if not dist.is_initialized():
            raise RuntimeError("FSDP2 needs a process group; start with torchrun --nproc-per-node 4")
        torch.manual_seed(args.seed)
        with job.device:
            model = GPT(GPTConfig(256, args.layers, args.d_model, args.heads, args.seq_len))
        shard(model, args)
        # The only lines that zeropp adds: apply() replaces the collectives of a model that FSDP2 has already sharded.
        adapter = None
        if not args.plain:
            adapter = fsdp2.apply(model, feedback=args.feedback, local_world_size=args.ranks_per_node)
        finished = train(model, job, args)
        if adapter is not None and job.rank == 0:
            print(adapter.ledger, flush=True)
    return 0 if finished else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
