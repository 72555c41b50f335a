"""DeepSpeed's ZeRO-3 as a contestant, where it is installed; its ZeRO++ needs a GPU.

Its JIT builds an extension at start, which wants a compiler and ninja on PATH.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from bench.common.contestant import ADAMW, Contestant, adamw
from bench.step_time.report import CLIP
from examples.text_data import Batches

__all__ = ["build_deepspeed"]


class _Stepper:
    """The engine's step where the others have an optimizer's."""

    def __init__(self, engine: nn.Module) -> None:
        self.engine = engine

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """The engine's step has done that."""


def build_deepspeed(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    """Stage 3 that keeps nothing from forward to backward.

    ``deepspeed_hpz``: with a second copy; ``deepspeed_cpu``: main weights, gradients and states are the CPU's, stepped
    by its own Adam and clipped.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError:
        raise SystemExit(f"--systems {name}: DeepSpeed is not installed here; leave it out") from None
    zero = {
        "stage": 3, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0, "overlap_comm": False,
        "reduce_bucket_size": 5_000_000,
    }  # fmt: skip
    if name == "deepspeed_hpz":
        zero["zero_hpz_partition_size"] = args.local
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": zero,
        "bf16": {"enabled": args.dtype == "bf16"},
        "communication_data_type": args.reduce_dtype,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if name == "deepspeed_cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
        config["gradient_clipping"] = CLIP
        settings = {key: value for key, value in ADAMW.items() if key != "fused"}
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **settings)
    else:
        optimizer = adamw(model)
    linear = functional.linear
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=not dist.is_initialized()
    )
    # It has put one of its own in torch's place, which is not for the others that take turns with it.
    own, functional.linear = functional.linear, linear
    return Contestant(
        name, engine, _Stepper(engine), batches, device, backward=engine.backward,
        precision=partial(mock.patch.object, functional, "linear", own),
    )  # fmt: skip
