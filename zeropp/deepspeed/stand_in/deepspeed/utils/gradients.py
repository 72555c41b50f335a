"""Gradients of several parameters, changed between backward and step."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from zeropp.deepspeed.parameter_values import safe_get_full_grad, safe_set_full_grad

__all__ = ["safe_update_full_grad_vectorized"]


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Give parameters other gradients for the step that follows. Collective.

    Args:
        param_list: the same on every rank; those without a gradient are left out.
        update_func: from a parameter's whole gradient and the parameter to the new one; the same on every rank.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
