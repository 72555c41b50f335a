"""``deepspeed.initialize``: zeropp's ``initialize``, changed where scripts rely on DeepSpeed's behavior.

Three things differ from :func:`zeropp.initialize`. A missing model raises AssertionError. A model that was wrapped
before may be wrapped again. The engine writes DeepSpeed's file of model weights, and ``state_dict()`` never
communicates.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from torch import nn

from zeropp.deepspeed.initialization import initialize as zeropp_initialize
from zeropp.engine.engine import Engine as Core
from zeropp.engine.engine_state import EngineState
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.guard import handler_of

__all__ = ["initialize"]

_SIGNATURE = inspect.signature(zeropp_initialize)


@wraps(zeropp_initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    model = _SIGNATURE.bind_partial(*args, **kwargs).arguments.get("model")
    # DeepSpeed's initialize() takes the script's arguments first. A missing model usually means that the script passed
    # the model in their place.
    assert model is not None, "initialize() got no model; give model=..., the first argument is the command line's"
    former = _let_go(model) if isinstance(model, nn.Module) else []
    try:
        made = zeropp_initialize(*args, **kwargs)
    except BaseException:
        # The model was not wrapped again, so its earlier engine keeps training it.
        for core in former:
            core.set_state(EngineState.RETIRED, on=False)
        raise
    engine = made[0]
    engine.writes_module_states = True
    assert engine.core.readable_weights is not None  # every training engine has this object
    engine.core.readable_weights.alone = True
    return made


def _let_go(model: nn.Module) -> list[Core]:
    """Retire the model's current training engines, so that a new engine can take over its weights; return them."""
    cores = {id(core): core for core in map(handler_of, model.parameters()) if isinstance(core, Core)}
    # Only engines with an optimizer have to be retired: zeropp's initialize takes over an inference engine as it is. It
    # also waits for an optimizer step in flight.
    found = [core for core in cores.values() if isinstance(core.listener, ZeroOptimizer) and not core.retired]
    for core in found:
        core.set_state(EngineState.RETIRED)
    return found
