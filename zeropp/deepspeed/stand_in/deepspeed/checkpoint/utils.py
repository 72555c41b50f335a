"""Copies of tensors for ``torch.save``, and the path of DeepSpeed's file of model weights."""

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
    """Return the path of the file that has the model's weights under the key "module", in stages 0 to 2.

    Args:
        base_folder: folder of the checkpoint.
        mp_rank_str: model-parallel rank in two digits; zeropp only writes the file of "00".
    """
    return os.path.join(base_folder, MODULE_STATES.replace("00", mp_rank_str))


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested values whose tensors are on ``device`` and have storages of their own.

    ``torch.save`` writes whole storages, so a small view of a large storage would make a large file. Equal views of one
    storage, such as tied weights in a state dict, share one copy, so ``torch.save`` writes them once.

    Args:
        item: tensor, or nested mappings, lists and tuples with tensors and other values.
        device: device of the copies.
    """
    return _cloned(item, device, {})


def _cloned(item: Any, device: torch.device | str, copies: dict[tuple[object, ...], tuple[Tensor, Tensor]]) -> Any:
    if isinstance(item, Tensor):
        view = storage_id(item), item.storage_offset(), item.shape, item.stride(), item.dtype
        if view not in copies:
            copied = item.detach().to(device)
            # Keep the original tensor as well: if its storage were freed, a new storage could get the same id.
            copies[view] = item, copied.clone() if copied.data_ptr() == item.data_ptr() else copied
        return copies[view][1]
    if isinstance(item, Mapping):
        return type(item)((key, _cloned(value, device, copies)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        return type(item)(_cloned(each, device, copies) for each in item)
    return item
