"""Random configurations and optimizers for random programs, and settings that must not change the result."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.branching_models import make_config

__all__ = ["WITHOUT_EFFECT", "Settings", "draw_settings"]

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# Replacements for a second run, whose weights must equal those of the first run bit for bit. None removes a setting.
WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"prefetch": 0},
    {"prefetch": 10**9},
    {"reuse": 0},
    {"live": 0},
    {"overlap_comm": False},
    {"overlap_comm": True},
    {"lazy_step": False},
    {"sub_group_size": 16},
    {"sub_group_size": 10**9},
    {"persist": 10**6},
    {"offload_optimizer": None, "offload_param": None},
    {"offload_optimizer": {"device": "cpu"}},
    {"weight_codec": None},
]

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.05}),
    (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 0.005, "eps": 1e-2, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2}),
    (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2, "fused": True}),
    (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}),
]
# Only these optimizers are drawn in 16-bit runs. Their steps are nearly proportional to sums of gradients; with all
# other optimizers, a rounding error of a 16-bit gradient can change a step completely.
OPTIMIZERS_OF_16_BITS = [*OPTIMIZERS[:3], (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2})]


@dataclass
class Settings:
    """A configuration, the parts of it that the plain side needs, and the optimizer of both sides.

    Attributes:
        config: the configuration of ZeroOptimizer.
        steps: micro-batches per accumulation window.
        managed: True if zeropp counts micro-batches (``managed_gradient_accumulation``).
        clip: largest gradient norm; 0 for no clipping.
        kind: class of the optimizer.
        given: arguments of the optimizer.
    """

    config: dict[str, Any]
    steps: int
    managed: bool
    clip: float
    kind: type[torch.optim.Optimizer]
    given: dict[str, Any]

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.kind(groups, **self.given)

    def __str__(self) -> str:
        return f"{self.kind.__name__} {self.given}, {self.config}"


def _draw_places(draw: random.Random, world: int, folder: Path) -> dict[str, Any]:
    """Draw the stage, the levels (hpZ, MiCS, ranks per node) and the offload of weights and states."""
    stage = draw.choices([0, 1, 2, 3], [1, 1, 2, 6])[0]
    given: dict[str, Any] = {"stage": stage}
    if world == 4:
        given["local_world_size"] = 2
        levels = draw.choice([{}, {}, {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}])
        given |= levels if stage == 3 else {}
    elif draw.random() < 0.2:
        given["local_world_size"] = 1
    if "local_world_size" in given and draw.random() < 0.3:
        given["defer_cross_reduction"] = True
    where = draw.random()
    if stage and where < 0.25:
        given["offload_optimizer"] = {"device": "cpu"}
        if stage == 3 and draw.random() < 0.4:
            given["offload_optimizer"]["ratio"] = 0.5
    elif stage and where < 0.3:
        given["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
    if stage == 3 and draw.random() < 0.2:
        device = draw.choice(["cpu", "cpu", "nvme"])
        given["offload_param"] = {"device": device, "nvme_path": str(folder)}
    return given


def draw_settings(
    draw: random.Random, world: int, dtype: torch.dtype, folder: Path, changed: dict[str, Any]
) -> Settings:
    """Draw the settings of one wrapping.

    ``changed`` replaces settings after the draw, so that a run with changes draws the same random numbers.
    """
    given = _draw_places(draw, world, folder)
    if given["stage"] == 3:
        given["persist"] = draw.choice([0, 0, 0, 12, 50, 10**6])
        given["prefetch"] = draw.choice([0, 50, 300, 10**6])
        given["live"] = draw.choice([0, 100, 500, 10**9])
        given["reuse"] = draw.choice([0, 100, 400, 10**9])
    given["sub_group_size"] = draw.choice([10**9, 20, 100])
    given["overlap_comm"] = draw.random() < 0.5
    given["unit_min_blocks"] = draw.choice([0, 0, 0, 1, 128])
    given["lazy_step"] = draw.random() < 0.7
    if draw.random() < 0.2:
        given["unit_numel"] = draw.choice([30, 100, 400])
    if draw.random() < 0.1 and dtype.itemsize > 2:
        given["reduce_scatter"] = "backend"
    lossless = draw.random() < 0.4 and (given["stage"] in (1, 2) or "zero_hpz_partition_size" in given)
    if dtype == torch.bfloat16:
        given |= {"bf16": {"enabled": True}, **({"weight_codec": "lossless"} if lossless else {})}
    if dtype == torch.float16:
        given["fp16"] = {"enabled": True, "initial_scale_power": 7, "hysteresis": 1}
    steps, managed = draw.choice([1, 1, 2, 3]), draw.random() < 0.5
    clip = draw.choice([0.0, 0.0, 0.3, 0.02])
    given |= {
        "gradient_accumulation_steps": steps, "gradient_clipping": clip, "managed_gradient_accumulation": managed,
        "hang_timeout": 15,
    }  # fmt: skip
    kind, arguments = draw.choice(OPTIMIZERS if dtype.itemsize > 2 else OPTIMIZERS_OF_16_BITS)
    if given["stage"] < 3:
        changed = {key: value for key, value in changed.items() if key not in ("prefetch", "live", "reuse", "persist")}
    if given["stage"] == 0 or not arguments.get("fused"):  # only fused steps are bit-equal on host and device
        changed = {key: value for key, value in changed.items() if not key.startswith("offload")}
    given = {key: value for key, value in {**given, **changed}.items() if value is not None}
    return Settings(make_config(**given), steps, managed, clip, kind, arguments)
