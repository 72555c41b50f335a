"""Helpers that scripts call on every model; they report that no expert is spread over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Return ``(False, 0)``: no such layers, and 0 experts."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Return False: no parameter belongs to an expert of one rank."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | list[dict[str, Any]], max_group_size: int | float | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups unchanged, as a list."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
