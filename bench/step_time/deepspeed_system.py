"""DeepSpeed's ZeRO-3 as a contestant, if DeepSpeed is installed. Its ZeRO++ needs a GPU.

DeepSpeed compiles an extension at its start, which needs a compiler and ninja on PATH.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from bench.common.contestant import ADAMW, Contestant, adamw
from bench.step_time.report import CLIP, clips
from examples.text_data import Batches

__all__ = ["build_deepspeed"]


class _Stepper:
    """An object with the methods of an optimizer that calls DeepSpeed's engine."""

    def __init__(self, engine: nn.Module) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict]:
        """Parameter groups of the optimizer inside the engine; scripts set learning rates in them."""
        return self.engine.optimizer.param_groups

    @property
    def grad_norm(self) -> float:
        """Gradient norm at the last step, before clipping."""
        return float(self.engine.get_global_grad_norm())

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """Do nothing: the engine's step sets gradients to None."""


def build_deepspeed(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    """Build a stage 3 engine that caches no weights between forward and backward.

    ``deepspeed_hpz`` adds a secondary shard per node. ``deepspeed_cpu`` keeps main weights, gradients and optimizer
    states on the CPU, steps them with DeepSpeed's own Adam, and clips. ``deepspeed_clipped`` clips.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError:
        raise SystemExit(f"--systems {name}: DeepSpeed is not installed here; leave it out") from None
    zero: dict[str, object] = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    # A GPU has streams for overlap, and memory for buckets of the default size.
    on_cpu = {"overlap_comm": False, "reduce_bucket_size": 5_000_000}
    zero |= {"overlap_comm": True} if device.type == "cuda" else on_cpu
    if name == "deepspeed_hpz":
        zero["zero_hpz_partition_size"] = args.local
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "zero_optimization": zero,
        "bf16": {"enabled": args.dtype == "bf16"},
        "communication_data_type": args.reduce_dtype,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": CLIP if clips(name) or name == "deepspeed_cpu" else 0.0,
    }
    if name == "deepspeed_cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
        settings = {key: value for key, value in ADAMW.items() if key != "fused"}
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **settings)
    else:
        optimizer = adamw(model)
    linear = functional.linear
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=not dist.is_initialized()
    )
    # initialize() replaces torch.nn.functional.linear. Restore torch's function for the other systems in this process;
    # only this system's forward uses DeepSpeed's.
    own, functional.linear = functional.linear, linear
    return Contestant(
        name, engine, _Stepper(engine), batches, device, backward=engine.backward,
        precision=partial(mock.patch.object, functional, "linear", own), weights=partial(_main_weights, model),
    )  # fmt: skip


def _main_weights(model: nn.Module) -> Iterator[Tensor]:
    """Return an iterator over the full float32 main weights. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return map(safe_get_full_fp32_param, model.parameters())
