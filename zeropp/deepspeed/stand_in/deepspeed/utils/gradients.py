"""``safe_update_full_grad_vectorized``: replace the gradients of several parameters between backward and step."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from zeropp.deepspeed.parameter_values import safe_get_full_grad, safe_set_full_grad

__all__ = ["safe_update_full_grad_vectorized"]


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradients of parameters before the optimizer step. Collective.

    Args:
        param_list: parameters, the same on every rank. Parameters without a gradient are skipped.
        update_func: function that gets a parameter's full gradient and the parameter, and returns the new gradient. It
            must return the same tensor on every rank.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
