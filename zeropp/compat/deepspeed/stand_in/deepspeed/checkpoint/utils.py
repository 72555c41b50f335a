"""Tensors before they are saved, and where they are afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeropp.training.saving import MODULE_STATES

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Where a checkpoint of stages 0 to 2 has the model's weights, under "module"; the only ``mp_rank_str`` is "00"."""
    return os.path.join(base_folder, MODULE_STATES.replace("00", mp_rank_str))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested values, their tensors on ``device`` and in storages of their own.

    ``torch.save`` writes whole storages: of a view it would write all that it is a view of.
    """
    if isinstance(item, Tensor):
        copied = item.detach().to(device)
        return copied.clone() if copied.data_ptr() == item.data_ptr() else copied
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    return item
