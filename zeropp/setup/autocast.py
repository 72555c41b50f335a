"""Forwards of a whole model under ``torch.autocast``, as the configuration's ``torch_autocast`` block asks for."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

from zeropp.access.refusals import restorer
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
    device_type, dtype = engine.device.type, autocast_dtype(config)
    # Weakly: what is in the model's own dict must not hold the model.
    ref, own, plain = weakref.ref(model), model.__dict__.get("forward"), type(model).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Its cache would keep converted weights of all units until the forward ends, which stage 3 has just released.
        with torch.autocast(device_type, dtype, cache_enabled=False):
            return plain(ref(), *args, **kwargs) if own is None else own(*args, **kwargs)

    # Trainers look at it for the names of a batch's columns.
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    # In place of hooks, which torch does not call after Ctrl-C: autocast would stay on.
    model.__dict__["forward"] = forward
    engine.on_close(restorer(model, "forward", own))
