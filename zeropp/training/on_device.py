"""``OnDevice``: models are built on a device and in a dtype."""

from __future__ import annotations

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """Inside ``with``, tensors made without a device are on this one, and floating ones without a dtype in this dtype.

    Those that name a dtype keep it, as tables of positions in float32; DeepSpeed would cast them.

    Args:
        dtype: floating.
        device: "meta" for no memory at all: give values with :func:`zeropp.zero.materialize`, or a checkpoint.
        enabled: False makes this do nothing.

    Raises:
        TypeError: the dtype is not floating.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        if not dtype.is_floating_point:
            raise TypeError(f"OnDevice got dtype {dtype}; expected a floating one")
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        # One for each use that is open: the same object may be entered inside itself.
        self._open: list[tuple[torch.dtype, torch.device]] = []

    def __enter__(self) -> None:
        if not self.enabled:
            return
        context = torch.device(self.device)
        context.__enter__()
        self._open.append((torch.get_default_dtype(), context))
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            before, context = self._open.pop()
            torch.set_default_dtype(before)
            context.__exit__(*error)
