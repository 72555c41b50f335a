"""A hook on the weights that layers compute with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def watch_weights(model: nn.Module, look: Callable[[str, nn.Parameter, bool], None]) -> None:
    """Call ``look`` for each parameter of each layer, after the layer's forward and before its backward.

    The arguments of the call are the parameter's name, the parameter, and True in backward. Only linear layers, layer
    norms and embeddings are watched. Their output is a tensor, and the hook before backward runs when the gradient of
    that tensor arrives.
    """

    def tell(path: str, module: nn.Module, in_backward: bool) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                look(f"{path}.{name}".removeprefix("."), parameter, in_backward)

    def watch(path: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda module, *_: tell(path, module, False))
        module.register_full_backward_pre_hook(lambda module, *_: tell(path, module, True))

    for path, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            watch(path, module)
