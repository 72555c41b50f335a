"""Tensors before they are saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zeropp.compat.deepspeed.refusals import refused

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]

get_model_ckpt_name_for_rank = refused(
    "checkpoint.utils.get_model_ckpt_name_for_rank",
    "checkpoints of zeropp have other files; deepspeed.utils.zero_to_fp32 reads them",
)


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
