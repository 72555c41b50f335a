"""``deepspeed.initialize``: zeropp's, where DeepSpeed of this version does something else that scripts rely on."""

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
    # The first argument is args: a model in its place is what DeepSpeed's error most often is about.
    assert model is not None, "initialize() got no model; give model=..., the first argument is the command line's"
    former = _let_go(model) if isinstance(model, nn.Module) else []
    try:
        made = zeropp_initialize(*args, **kwargs)
    except BaseException:
        # What could not be wrapped once more is trained as before.
        for core in former:
            core.set_state(EngineState.RETIRED, on=False)
        raise
    engine = made[0]
    engine.writes_module_states = True
    assert engine.core.readable_weights is not None  # of every training engine
    engine.core.readable_weights.alone = True
    return made


def _let_go(model: nn.Module) -> list[Core]:
    """Let a model that is given once more be the newer engine's, with the weights that it has. Returns its engines."""
    cores = {id(core): core for core in map(handler_of, model.parameters()) if isinstance(core, Core)}
    # One for inference is taken over as it is; a step that the host is at is waited for by the new one.
    found = [core for core in cores.values() if isinstance(core.listener, ZeroOptimizer) and not core.retired]
    for core in found:
        core.set_state(EngineState.RETIRED)
    return found
