"""Forwards of a whole model under ``torch.autocast``, as the configuration's ``torch_autocast`` block asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeropp.config import Config
from zeropp.engine.engine import Engine
from zeropp.params.dtypes import autocast_dtype

__all__ = ["autocast_forwards"]


def autocast_forwards(model: nn.Module, engine: Engine, config: Config) -> None:
    """Have every forward of ``model`` run under autocast until the engine is closed, if the configuration says so.

    Calls of modules inside it, from elsewhere, are the caller's.
    """
    if not config.torch_autocast.enabled:
        return
    device_type, entered = engine.device.type, list[Any]()
    dtype = autocast_dtype(config)

    def enter(module: nn.Module, args: object) -> None:
        # Its cache would keep converted weights of all units until the forward ends, which stage 3 has just released.
        context = torch.autocast(device_type, dtype, cache_enabled=False)
        context.__enter__()
        entered.append(context)

    def leave(module: nn.Module, args: object, output: object) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    # First in, so that it is entered whatever another hook raises; and left whatever the forward does.
    engine.on_close(model.register_forward_pre_hook(enter, prepend=True).remove)
    engine.on_close(model.register_forward_hook(leave, always_call=True).remove)
