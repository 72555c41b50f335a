"""Gradients as the user finds them in ``optimizer.param_groups``: parts of the model's, whose norm says little.

Trainers clip and log by ``torch.nn.utils.clip_grad_norm_`` over the tensors of the groups, or by sums of squares. On a
rank that holds a part of each gradient this would be the norm of the parts, another one on each rank. So the gradients
are of a subclass that refuses norms, and whatever else makes one number of a gradient: also products of stacked
gradients, sums over the elements of each, counts of the elements that a comparison has found, and what compares
elements, such as topk. Everything else works, and what is computed from a part is one, too. Reading single elements and
tests such as ``isfinite().all()`` are not refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zeropp._compat import storage_id, unguarded

__all__ = ["as_partial"]

# Functions that torch's clip_grad_norm_ is made of, and those that loops call to normalize gradients: some of them
# return lists of numbers, or tensors.
_NORMS = frozenset(
    (
        torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm,
        torch.functional.norm, torch._foreach_norm, torch.nn.functional.normalize, torch.renorm, Tensor.renorm,
    )
)  # fmt: skip
# Functions that multiply gradients with each other, or that count elements of one.
_PRODUCTS = frozenset(("matmul", "__matmul__", "mm", "bmm"))
_ACROSS = frozenset(
    (
        "mv", "addmm", "addmv", "baddbmm", "addbmm", "linear", "bilinear", "inner", "tensordot", "einsum", "cdist",
        "__rmatmul__", "cosine_similarity", "pairwise_distance", "corrcoef", "cov", "histc", "count_nonzero", "unique",
        "vecdot", "linalg_vecdot", "svd", "linalg_svd", "linalg_svdvals", "qr", "linalg_qr", "pinverse", "linalg_pinv",
        "linalg_multi_dot", "linalg_cond", "linalg_matrix_rank", "ger", "outer", "kron",
    )
)  # fmt: skip
_TRANSPOSES = frozenset(("t", "transpose", "swapaxes", "swapdims", "adjoint", "__get__"))  # the last is of .T, .mT
_TESTS = frozenset(("isnan", "isinf", "isfinite", "isposinf", "isneginf"))
# Functions that go over a dimension -> the place of ``dim`` among their arguments, and what it is if it is not given.
_OVER: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        (
            "sum", "nansum", "mean", "nanmean", "prod", "cumsum", "cumprod", "logcumsumexp", "amax", "amin", "max",
            "min", "aminmax", "var", "std", "var_mean", "std_mean", "logsumexp", "argmax", "argmin", "softmax",
            "log_softmax", "median", "nanmedian",
        ),
        (1, None),
    ),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    **dict.fromkeys(("quantile", "nanquantile"), (2, None)),
}  # fmt: skip
_ELEMENTS = frozenset(
    (
        Tensor.__getitem__, Tensor.select, torch.select, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty,
        Tensor.new_full, Tensor.new_tensor,
    )
)  # fmt: skip


class PartialGradient(Tensor):
    """A tensor that was computed from this rank's part of a gradient, element by element.

    Attributes:
        in_columns: whether a matrix has the elements of gradients in its first dimension, not in its last.
    """

    in_columns = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse norms and other single numbers, compute everything else, and mark what is computed as parts."""
        name, kwargs = func.__name__, kwargs or {}
        given = args or tuple(kwargs.values())
        # Without it ``func`` would lead back to this method.
        with unguarded():
            in_columns = _has_columns(given)
            if func in _NORMS or _mixes_elements(name, given, kwargs, in_columns):
                raise _refused(func)
            found = func(*args, **kwargs)
            several = isinstance(found, (tuple, list))
            for each in found if several else (found,):
                if _is_computed(each, given) and func not in _ELEMENTS and _is_number(each, given):
                    raise _refused(func)
            if name in _TESTS:
                return found
            in_columns ^= _turns(name, given, kwargs)
            if type(found) in (tuple, list):  # of splits, not the named results of max, say
                return type(found)(_marked(each, given, in_columns) for each in found)
            return found if several else _marked(found, given, in_columns)

    # A copy or a file has no part in training.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _marked(found: Any, args: tuple[Any, ...], in_columns: bool) -> Any:
    """A result as a part of gradients, if it is one."""
    if not _is_computed(found, args) or not found.ndim:
        return found
    found = found.as_subclass(PartialGradient)
    found.in_columns = in_columns and found.ndim > 1
    return found


def _has_columns(args: tuple[Any, ...]) -> bool:
    """Tell whether some argument, or an entry of a list, has elements of gradients in its first dimension."""
    each = [one for arg in args for one in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    return any(isinstance(one, PartialGradient) and one.in_columns for one in each)


def _turns(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation brings the elements of gradients from a matrix's last dimension to the first."""
    if name == "stack":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return dim in (1, -1) and args[0][0].ndim == 1
    return name in _TRANSPOSES


def _mixes_elements(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_columns: bool) -> bool:
    """Tell whether an operation goes over the dimension where gradients, also stacked ones, have their elements."""
    if name in _PRODUCTS and len(args) > 1:
        # Weights [tasks] @ gradients [tasks, elements] work on each element by itself; so do columns @ weights.
        if isinstance(args[0], PartialGradient):
            return not in_columns or isinstance(args[1], PartialGradient)
        return in_columns or args[1].ndim < 2
    if name not in _OVER or not args or not isinstance(args[0], Tensor):
        return name in _ACROSS
    place, dim = _OVER[name]
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else dim))
    if isinstance(dim, Tensor):  # another tensor, as for torch.max
        return False
    if dim is None and name in ("quantile", "nanquantile"):
        return True
    elements = (0, -args[0].ndim) if in_columns else (-1, args[0].ndim - 1)
    return any(each in elements for each in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _is_computed(found: object, args: tuple[Any, ...]) -> bool:
    """Tell whether a result is a new tensor; operations in place return what they were given."""
    return type(found) is Tensor and all(found is not each for each in args)


def _is_number(found: Tensor, args: tuple[Any, ...]) -> bool:
    """Tell whether a result is one number that was made of several."""
    given = [each for each in args if isinstance(each, Tensor)]
    # A part of what was given is an element of it.
    # ``any`` and ``all`` are tests.
    if found.numel() != 1 or found.dtype == torch.bool or any(storage_id(found) == storage_id(each) for each in given):
        return False
    return found.ndim == 0 or any(each.numel() > 1 for each in given)


def _refused(func: Callable[..., Any]) -> RuntimeError:
    name = func.__name__.removeprefix("linalg_")
    return RuntimeError(
        f"{name} of a gradient in optimizer.param_groups: each rank has only a part of every gradient there, so the "
        "result would be another one on each rank. Use optimizer.clip_grad_norm_(max_norm) or "
        '{"gradient_clipping": max_norm} to clip, optimizer.grad_norm for the norm over the whole model, and '
        "optimizer.grad_norms() for the norm of each parameter; torch.distributed.all_reduce adds up other numbers, of "
        "gradient.as_subclass(torch.Tensor)"
    )


class _SliceGradient(PartialGradient):
    """One that the optimizer's groups show.

    torch's GradScaler asks every gradient for these three. As attributes of Python they cost less than a plain
    tensor's, and much less than the call of ``__torch_function__`` that the others take.
    """

    is_sparse = False
    device: Any = None
    dtype: Any = None


def as_partial(gradient: Tensor) -> Tensor:
    """The same memory, and the same version, as a tensor that refuses norms."""
    found = gradient.as_subclass(_SliceGradient)
    found.device, found.dtype = gradient.device, gradient.dtype
    return found


def _plain(tensor: Tensor) -> Tensor:
    with unguarded():
        return tensor.as_subclass(Tensor)
