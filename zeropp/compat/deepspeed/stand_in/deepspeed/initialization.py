"""``deepspeed.initialize``: zeropp's, with a word where DeepSpeed of this version has another default."""

from __future__ import annotations

from functools import wraps
from typing import Any

from zeropp.config.base import notify
from zeropp.training import initialize as zeropp_initialize

__all__ = ["initialize"]


@wraps(zeropp_initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    made = zeropp_initialize(*args, **kwargs)
    engine = made[0]
    # Only where something is trained: nothing else is clipped.
    if engine.optimizer is not None and "gradient_clipping" not in engine.loaded_config.model_fields_set:
        notify(
            "gradient_clipping is not set, and nothing is clipped; DeepSpeed clips at 1.0 then since 0.19, and did not "
            "before. Set 1.0 or 0.0"
        )
    return made
