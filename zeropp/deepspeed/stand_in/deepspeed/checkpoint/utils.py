"""Tensors before they are saved, and where they are afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeropp._compat import storage_id
from zeropp.deepspeed.training_engine import MODULE_STATES

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Where a checkpoint of stages 0 to 2 has the model's weights, under "module"; the only ``mp_rank_str`` is "00"."""
    return os.path.join(base_folder, MODULE_STATES.replace("00", mp_rank_str))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested values, their tensors on ``device`` and in storages of their own.

    ``torch.save`` writes whole storages: of a view it would write all that it is a view of. Tensors that are the same
    view of one storage, as tied weights are in a state dict, share the copy, too: who saves it writes them once.
    """
    return _cloned(item, device, {})


def _cloned(item: Any, device: torch.device | str, copies: dict[tuple[object, ...], tuple[Tensor, Tensor]]) -> Any:
    if isinstance(item, Tensor):
        view = storage_id(item), item.storage_offset(), item.shape, item.stride(), item.dtype
        if view not in copies:
            copied = item.detach().to(device)
            # With the tensor itself: its storage must live for as long as its number stands for it.
            copies[view] = item, copied.clone() if copied.data_ptr() == item.data_ptr() else copied
        return copies[view][1]
    if isinstance(item, Mapping):
        return type(item)((key, _cloned(value, device, copies)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        return type(item)(_cloned(each, device, copies) for each in item)
    return item
