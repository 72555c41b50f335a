"""Checkpoint folders in the format of DeepSpeed's ``save_checkpoint``, made from a plain model and its optimizer.

The files follow the published format. Each rank's part is cut from whole tensors here, without the code under test. The
classes that DeepSpeed's files refer to are defined under DeepSpeed's module names while the files are written.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["write_deepspeed"]


@contextmanager
def _deepspeed() -> Iterator[Any]:
    """Add modules with DeepSpeed's names to ``sys.modules``, with the classes that its checkpoints refer to."""
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.fp16.loss_scaler",
             "deepspeed.runtime.zero", "deepspeed.runtime.zero.config", "deepspeed.utils",
             "deepspeed.utils.tensor_fragment"]  # fmt: skip
    modules = {name: types.ModuleType(name) for name in names}
    made = {
        "DynamicLossScaler": ("deepspeed.runtime.fp16.loss_scaler", type("DynamicLossScaler", (), {})),
        "LossScaler": ("deepspeed.runtime.fp16.loss_scaler", type("LossScaler", (), {})),
        "ZeroStageEnum": ("deepspeed.runtime.zero.config", type("ZeroStageEnum", (int,), {
            "__reduce_ex__": lambda self, protocol: (type(self), (int(self),))})),
        "fragment_address": ("deepspeed.utils.tensor_fragment", type("fragment_address", (), {})),
    }  # fmt: skip
    for name, (module, cls) in made.items():
        cls.__module__ = module
        setattr(modules[module], name, cls)
    sys.modules.update(modules)
    try:
        yield types.SimpleNamespace(**{name: cls for name, (_, cls) in made.items()})
    finally:
        for name in names:
            del sys.modules[name]


def write_deepspeed(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: int,
    stage: int,
    *,
    tag: str = "global_step4",
    bf16: bool = False,
    per_sub_group: int = 3,
    scaler: dict[str, Any] | None = None,
) -> Path:
    """Write one checkpoint and the file ``latest``, and return the checkpoint's folder.

    Args:
        root: folder in which the checkpoint's folder is created.
        model: model whose trained parameters belong to the optimizer. The files contain its weights in bfloat16.
        optimizer: Adam or AdamW that has taken a step.
        world: number of ranks whose files are written.
        stage: 1, 2 or 3.
        tag: name of the checkpoint.
        bf16: True to write the keys of DeepSpeed's optimizer for bfloat16 (stage 1).
        per_sub_group: parameters per sub-group in stage 3.
        scaler: attributes of a dynamic loss scaler; None for a static one.
    """
    folder = root / tag
    folder.mkdir(parents=True)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]
    if stage == 3:
        step = per_sub_group
        owners = [(i, g[at : at + step]) for i, g in enumerate(groups) for at in range(0, len(g), step)]
    else:
        owners = list(enumerate(groups))
    states = {name: optimizer.state[p] for group in groups for name, p in group}
    with _deepspeed() as classes:
        for rank in range(world):
            rows = [_rows(own, states, rank, world, stage) for _, own in owners]
            settings = [
                {**group, "params": [n for n, (g, _) in enumerate(owners) if g == i]}
                for i, group in enumerate(optimizer.param_groups)
            ]
            base = {"state": {n: row for n, (row, _, _) in enumerate(rows)}, "param_groups": settings}
            moves = classes.DynamicLossScaler if scaler else classes.LossScaler
            inner: dict[str, Any] = {"loss_scaler": moves(), "overflow": False}
            vars(inner["loss_scaler"]).update(scaler or {"cur_scale": 1.0, "dynamic": False})
            inner["partition_count"] = world if stage == 3 else [world] * len(owners)
            if stage == 3:
                inner |= {"zero_stage": classes.ZeroStageEnum(3), "optimizer_state_dict": base}
                inner["fp32_flat_groups"] = [flat for _, flat, _ in rows]
            else:
                inner["base_optimizer_state"] = base
                inner["param_slice_mappings"] = [OrderedDict(a=classes.fragment_address())]
                # DeepSpeed's optimizer for bfloat16 keeps the padding and writes no stage.
                inner["single_partition_of_fp32_groups"] = [flat if bf16 else lean for _, flat, lean in rows]
                if not bf16:
                    inner["zero_stage"] = classes.ZeroStageEnum(stage)
            name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19"}, folder / name)
            if stage == 3 or rank == 0:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                torch.save(
                    _model_state(model, [own for _, own in owners], rank, world, stage),
                    folder / f"{prefix}mp_rank_00_model_states.pt",
                )
    (root / "latest").write_text(tag)
    return folder


def _rows(
    own: list[tuple[str, nn.Parameter]], states: dict[str, Any], rank: int, world: int, stage: int
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return a rank's part of one group: states, main weights, and main weights without padding."""
    step = states[own[0][0]]["step"].clone()

    def row(values: list[Tensor]) -> tuple[Tensor, Tensor]:
        if stage == 3:
            whole = torch.cat([_part(value, rank, world) for value in values])
            return whole, whole
        flat = torch.cat([value.detach().reshape(-1) for value in values])
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % (2 * world))])
        size = padded.numel() // world
        mine = padded[rank * size : (rank + 1) * size].clone()
        padding = padded.numel() - flat.numel() if rank == world - 1 else 0
        return mine, mine[: size - padding]

    weights, lean = row([p for _, p in own])
    moments = {key: row([states[name][key] for name, _ in own])[0] for key in ("exp_avg", "exp_avg_sq")}
    return {"step": step, **moments}, weights, lean


def _part(value: Tensor, rank: int, world: int) -> Tensor:
    flat = value.detach().reshape(-1)
    size = -(-flat.numel() // world)
    padded = torch.cat([flat, flat.new_zeros(size * world - flat.numel())])
    return padded[rank * size : (rank + 1) * size].clone()


def _model_state(
    model: nn.Module, groups: list[list[tuple[str, nn.Parameter]]], rank: int, world: int, stage: int
) -> dict[str, Any]:
    trained = {name for group in groups for name, _ in group}
    buffers = [name for name, _ in model.named_buffers()]
    module, shared, first = OrderedDict(), {}, {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in buffers or not isinstance(value, nn.Parameter):
            module[name] = value.detach()
            continue
        module[name] = torch.empty(0, dtype=torch.bfloat16) if stage == 3 else value.detach().bfloat16()
        if id(value) in first:
            shared[name] = first[id(value)]
        first.setdefault(id(value), name)
    frozen = {name: p.detach().bfloat16() for name, p in model.named_parameters() if name not in trained}
    fragments = {name: _part(value, rank, world) if stage == 3 else value for name, value in frozen.items()}
    return {
        "module": module,
        "buffer_names": buffers,
        "param_shapes": [OrderedDict((name, p.shape) for name, p in group) for group in groups],
        # In stage 1, frozen weights are only among the module's weights.
        "frozen_param_shapes": {name: value.shape for name, value in frozen.items()} if stage > 1 else None,
        "frozen_param_fragments": fragments if stage > 1 else None,
        "shared_params": shared,
        "lr_scheduler": {"last_batch_iteration": 3},
        "global_steps": 4,
        "dp_world_size": world,
        "ds_version": "0.19",
    }
