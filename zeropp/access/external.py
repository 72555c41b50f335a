"""Parameters that a module's forward uses although they are not its own, as the user has declared."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zeropp.engine.engine import Engine
from zeropp.params.guard import handler_of

__all__ = ["external_parameters", "register_external_parameter"]

_EXTERNAL = "_zeropp_external"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's forward uses a parameter that is not its own, so that it is fetched ahead with its own.

    Needed by no model: such a parameter is fetched when it is touched. The same call on every rank; before or after
    the model is wrapped.

    Raises:
        TypeError: what is given is no module, or no parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter got a {type(module).__name__} and a {type(parameter).__name__}; expected a "
            "module and a parameter"
        )
    # A list, and no attribute of its own: module.parameters() must not find the parameter here, too.
    known = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(other is parameter for other in known):
        known.append(parameter)
        engine = handler_of(parameter)
        # Before wrapping there is none; hooks are set up from the list then.
        if isinstance(engine, Engine):
            engine.use_in(module, parameter)


def external_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters registered with a module."""
    yield from module.__dict__.get(_EXTERNAL, ())
