"""Gradients in ``optimizer.param_groups``: tensors that hold this rank's part of a gradient and refuse norms.

Trainers clip and log by ``torch.nn.utils.clip_grad_norm_`` over the tensors of the groups, or by sums of squares. On a
rank that holds only a part of each gradient, the result would be the norm of the parts, which differs between ranks. So
these gradients are of a tensor subclass that refuses operations that combine elements of a gradient into single
numbers. Examples are norms, products of stacked gradients, sums over the elements, counts after a comparison, and
operations that compare elements, such as topk. All other operations work. Their results are of the subclass, too,
except those of ``isnan``, ``isfinite`` and the like, so that users can count such elements. Reading single elements and
tests such as ``isfinite().all()`` are allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp._compat import storage_id, uncompiled, unguarded
from zeropp.params.guard import set_class

__all__ = ["MARKER_GRADIENT", "NOTHING", "as_partial"]

# Name and gradient value of the markers at the end of each group: see [Note: edits of slices].
NOTHING = "<nothing>"
MARKER_GRADIENT = 1e-30  # nonzero, because some loops set zero gradients to None; too small to change a sum

# Norm functions, which are always refused: torch's norms and functions that normalize. They need a list of their own,
# because some return lists or several elements.
_NORMS = frozenset(
    (
        torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm,
        torch.functional.norm, torch._foreach_norm, torch.nn.functional.normalize, torch.renorm, Tensor.renorm,
    )
)  # fmt: skip
# Products, which are refused if they sum over elements of a gradient. Then functions that always combine or count
# elements, and are always refused.
_PRODUCTS = frozenset(("matmul", "__matmul__", "mm", "bmm", "mv"))
_ACROSS = frozenset(
    (
        "addmm", "addmv", "addr", "baddbmm", "addbmm", "linear", "bilinear", "inner", "tensordot", "einsum", "cdist",
        "__rmatmul__", "cosine_similarity", "pairwise_distance", "corrcoef", "cov", "histc", "histogram", "histogramdd",
        "count_nonzero", "unique", "vecdot", "linalg_vecdot", "svd", "linalg_svd", "linalg_svdvals", "svd_lowrank",
        "qr", "linalg_qr", "pinverse", "linalg_pinv", "linalg_multi_dot", "linalg_cond", "linalg_matrix_rank", "ger",
        "outer", "kron", "layer_norm", "rms_norm",
    )
)  # fmt: skip
# Functions over a dimension -> the position of ``dim`` in their arguments, and the default of ``dim``. These functions
# are refused if ``dim`` is the dimension of a gradient's elements. Without ``dim``, most of them are refused because
# their result is one number.
_OVER: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        (
            "sum", "nansum", "mean", "nanmean", "prod", "cumsum", "cumprod", "logcumsumexp", "amax", "amin", "max",
            "min", "aminmax", "var", "std", "var_mean", "std_mean", "logsumexp", "argmax", "argmin", "softmax",
            "log_softmax", "median", "nanmedian", "cummax", "cummin",
        ),
        (1, None),
    ),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    **dict.fromkeys(("quantile", "nanquantile"), (2, None)),
    "msort": (1, 0),
}  # fmt: skip
_TRANSPOSES = frozenset(
    ("t", "T", "mT", "H", "mH", "transpose", "swapaxes", "swapdims", "movedim", "permute", "adjoint")
)
# Functions with unmarked results. Users may count NaN or Inf. torch.compile follows ``_base`` until it is None, so the
# base must be returned unchanged.
_UNMARKED = frozenset(("isnan", "isinf", "isfinite", "isposinf", "isneginf", "_base"))
# Functions that return some of the elements or their places, or a new tensor with other values. A result with one
# element is allowed.
_ELEMENTS = frozenset(
    (
        "__getitem__", "select", "masked_select", "nonzero", "argwhere", "where", "take", "new_zeros", "new_ones",
        "new_empty", "new_full", "new_tensor",
    )
)  # fmt: skip


class PartialGradient(Tensor):
    """A tensor that was computed elementwise from this rank's part of a gradient.

    Attributes:
        in_columns: True if a matrix has gradient elements along its first dimension, False if along its last.
    """

    in_columns = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse operations that combine elements into single numbers; mark other operations' results as partial."""
        # Without unguarded(), ``func`` would call this method again.
        with unguarded():
            return _compute(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _marked(copy.deepcopy(_plain(self), memo), self.in_columns)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickled gradient becomes a plain tensor, because a tensor in a file takes no part in training.
        return _plain(self).__reduce_ex__(protocol)


@dataclass(frozen=True)
class _Given:
    """The arguments of an operation, and the layout of gradient elements in them.

    Attributes:
        args: positional arguments; keyword arguments if there are no positional ones.
        kwargs: keyword arguments.
        numel: number of elements of the largest gradient part among the arguments; 1 if there is none.
        in_columns: True if some argument has gradient elements along its first dimension.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numel: int
    in_columns: bool

    @staticmethod
    def from_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
        """Inspect all arguments of a call, including the entries of lists and tuples."""
        args = args or tuple(kwargs.values())
        each = [one for arg in args for one in (arg if isinstance(arg, (tuple, list)) else (arg,))]
        parts = [one for one in each if isinstance(one, PartialGradient) and one.ndim]
        columns = any(part.in_columns for part in parts)
        return _Given(args, kwargs, max((part.shape[0 if columns else -1] for part in parts), default=1), columns)

    def has_columns(self, found: Tensor, name: str) -> bool:
        """Return True if a result has gradient elements along its first dimension.

        Args:
            found: result of the operation.
            name: name of the operation.
        """
        if found.ndim != 2 or (found.shape[0] == self.numel) != (found.shape[1] == self.numel):
            return found.ndim == 2 and found.shape[0] == self.numel
        # The shape does not decide, for example for a square matrix, so decide by the operation.
        dim = self.kwargs.get("dim", self.args[1] if len(self.args) > 1 else 0)
        if name in ("stack", "column_stack"):
            return name == "column_stack" or dim in (1, -1)
        return self.in_columns != (name in _TRANSPOSES)


@uncompiled
def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation unless it is refused, and mark its results as partial gradients."""
    # Access to a property such as ``.T`` arrives as ``__get__`` of a descriptor that has the property's name.
    name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__  # type: ignore[attr-defined]
    given = _Given.from_call(args, kwargs)
    if func in _NORMS or _mixes_elements(name, given):
        raise _refused(func)
    found = func(*args, **kwargs)
    several = isinstance(found, (tuple, list))
    results = [each for each in (found if several else (found,)) if _is_computed(each, args)]
    if name not in _ELEMENTS and any(_is_number(each, name, given) for each in results):
        raise _refused(func)
    if name in _UNMARKED:
        return found
    _mark_target(name, args)
    if several:
        parts = [_marked(each, given.has_columns(each, name)) if _is_computed(each, args) else each for each in found]
        return type(found)(parts)
    return _marked(found, given.has_columns(found, name)) if results else found


def _mark_target(name: str, args: tuple[Any, ...]) -> None:
    """Mark a tensor as partial after an in-place write into it, such as a buffer that collects several gradients."""
    if name != "__setitem__" and (not name.endswith("_") or name.endswith("__")):
        return
    for target in args[0] if isinstance(args[0], (tuple, list)) else args[:1]:
        # Do not mark weights, nor views, which may be of weights.
        if type(target) is Tensor and target.ndim and target._base is None and not target.requires_grad:
            set_class(target, PartialGradient)


def _marked(found: Tensor, in_columns: bool) -> Tensor:
    """Return a result as a PartialGradient; return a scalar unchanged."""
    if found.ndim:
        found = found.as_subclass(PartialGradient)
        found.in_columns = in_columns
    return found


def _mixes_elements(name: str, given: _Given) -> bool:
    """Return True if an operation combines elements along the dimension of gradient elements.

    Args:
        name: name of the operation.
        given: arguments of the operation.
    """
    args = given.args
    kwargs = given.kwargs
    if name in _PRODUCTS and len(args) > 1:
        # weights [tasks] @ gradients [tasks, elements] is elementwise in the gradients, and so is columns [elements,
        # tasks] @ weights.
        if isinstance(args[0], PartialGradient):
            return not given.in_columns or isinstance(args[1], PartialGradient)
        return given.in_columns or args[1].ndim < 2
    if name not in _OVER or not args or not isinstance(args[0], Tensor):
        return name in _ACROSS
    place, dim = _OVER[name]
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else dim))
    if isinstance(dim, Tensor):  # torch.max(a, b) and the like compare two tensors elementwise
        return False
    if dim is None and name in ("quantile", "nanquantile"):
        return True
    elements = (0, -args[0].ndim) if given.in_columns else (-1, args[0].ndim - 1)
    return any(each in elements for each in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _is_computed(found: object, args: tuple[Any, ...]) -> bool:
    """Return True if a result is a new tensor; in-place operations return one of their arguments."""
    return type(found) is Tensor and all(found is not each for each in args)


def _is_number(found: Tensor, name: str, given: _Given) -> bool:
    """Return True if a result is one number that was computed from several elements of a gradient.

    Args:
        found: result of the operation.
        name: name of the operation.
        given: arguments of the operation.
    """
    # Bool results, as of ``any`` and ``all``, are tests, which are allowed.
    if found.numel() != 1 or found.dtype == torch.bool:
        return False
    # The gradient itself has one element. _foreach_ functions give one result for each gradient of a list.
    if found.ndim and (given.numel == 1 or name.startswith("_foreach_")):
        return False
    # A result that shares memory with an argument is one of its elements.
    return not any(isinstance(each, Tensor) and storage_id(found) == storage_id(each) for each in given.args)


def _refused(func: Callable[..., Any]) -> RuntimeError:
    """Return the error for a refused operation, which names zeropp's substitutes."""
    name = func.__name__.removeprefix("linalg_")
    return RuntimeError(
        f"{name} of a gradient in optimizer.param_groups: each rank has only a part of every gradient there, so the "
        "result would be another one on each rank. Use optimizer.clip_grad_norm_(max_norm) or "
        '{"gradient_clipping": max_norm} to clip, optimizer.grad_norm for the norm over the whole model, and '
        "optimizer.grad_norms() for the norm of each parameter; torch.distributed.all_reduce adds up other numbers, of "
        "gradient.as_subclass(torch.Tensor)"
    )


class _SliceGradient(PartialGradient):
    """A gradient that ``optimizer.param_groups`` shows.

    torch's GradScaler reads ``is_sparse``, ``device`` and ``dtype`` of every gradient. As Python attributes they are
    cheaper to read than those of a plain tensor, and much cheaper than a call of ``__torch_function__``.
    """

    is_sparse = False
    device: Any = None
    dtype: Any = None


def as_partial(gradient: Tensor) -> Tensor:
    """Return a view of the gradient that refuses norms and shares its memory and version counter."""
    found = gradient.as_subclass(_SliceGradient)
    found.device = gradient.device
    found.dtype = gradient.dtype
    return found


def _plain(tensor: Tensor) -> Tensor:
    """Return the same tensor as a plain ``torch.Tensor``."""
    with unguarded():
        return tensor.as_subclass(Tensor)
