"""What a module returns must not be memory that is about to go."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

from zeropp.engine.tensors import map_tensors, tensors_in

__all__ = ["copy_views"]


def copy_views(output: object, storages: Container[int], where: str) -> object:
    """A module's output with copies of whatever lies in one of ``storages``; the very object if nothing does.

    Args:
        output: as the module returned it.
        storages: identities of gathered weights' storages.
        where: the module's name.

    Raises:
        RuntimeError: a view of a weight is inside an object that cannot be rebuilt.
    """

    def lies_there(tensor: Tensor) -> bool:
        try:
            return tensor.untyped_storage()._cdata in storages
        except (NotImplementedError, RuntimeError):
            return False  # sparse, or inside a transform of torch.func: no storage of its own, so no view of ours

    if not any(map(lies_there, tensors_in(output))):
        return output
    copied = map_tensors(output, lambda tensor: tensor.clone() if lies_there(tensor) else tensor)
    if any(map(lies_there, tensors_in(copied))):
        raise RuntimeError(
            f"module {where or 'at the root'!r} returns a weight, or a view of one, inside a {type(output).__name__}, "
            "and the weight's memory goes when the module is left; return a copy of it, weight.clone()"
        )
    return copied
