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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp._compat import storage_id, uncompiled, unguarded
from zeropp.params.guard import set_class

__all__ = ["MARKER_GRADIENT", "NOTHING", "as_partial"]

# The name and the gradient of markers, which end each group: see [Note: edits of slices].
NOTHING = "<nothing>"
MARKER_GRADIENT = 1e-30  # not zero, since some loops set gradients of zero to None; too small to change a sum

# Functions that torch's clip_grad_norm_ is made of, and those that loops call to normalize gradients: some of them
# return lists of numbers, or tensors.
_NORMS = frozenset(
    (
        torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm,
        torch.functional.norm, torch._foreach_norm, torch.nn.functional.normalize, torch.renorm, Tensor.renorm,
    )
)  # fmt: skip
# Functions that multiply gradients with each other, or that count or compare the elements of one.
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
# Functions that go over a dimension -> the place of ``dim`` among their arguments, and what it is if it is not given.
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
# What is to be counted, as NaN, and what is no result: torch.compile asks for bases of views until there is none.
_UNMARKED = frozenset(("isnan", "isinf", "isfinite", "isposinf", "isneginf", "_base"))
# Functions that give some of the elements, or a tensor with other values.
_ELEMENTS = frozenset(
    (
        "__getitem__", "select", "masked_select", "nonzero", "argwhere", "where", "take", "new_zeros", "new_ones",
        "new_empty", "new_full", "new_tensor",
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
        # Without it ``func`` would lead back to this method.
        with unguarded():
            return _compute(func, args, kwargs or {})

    # A file has no part in training.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _marked(copy.deepcopy(_plain(self), memo), self.in_columns)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


@dataclass(frozen=True)
class _Given:
    """The arguments of an operation, with what they say of its result.

    Attributes:
        args: those by place, or by name where there are no others.
        kwargs: those by name.
        numel: elements of each gradient that is a part of some argument.
        in_columns: whether one has them in its first dimension.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numel: int
    in_columns: bool

    @staticmethod
    def from_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given:
        """Look at all arguments, and at the entries of lists."""
        args = args or tuple(kwargs.values())
        each = [one for arg in args for one in (arg if isinstance(arg, (tuple, list)) else (arg,))]
        parts = [one for one in each if isinstance(one, PartialGradient) and one.ndim]
        columns = any(part.in_columns for part in parts)
        return _Given(args, kwargs, max((part.shape[0 if columns else -1] for part in parts), default=1), columns)

    def has_columns(self, found: Tensor, name: str) -> bool:
        """Tell whether a result has the elements of gradients in its first dimension."""
        if found.ndim != 2 or (found.shape[0] == self.numel) != (found.shape[1] == self.numel):
            return found.ndim == 2 and found.shape[0] == self.numel
        # A square tells nothing by its shape.
        dim = self.kwargs.get("dim", self.args[1] if len(self.args) > 1 else 0)
        if name in ("stack", "column_stack"):
            return name == "column_stack" or dim in (1, -1)
        return self.in_columns != (name in _TRANSPOSES)


@uncompiled
def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Attributes such as ``.T`` come as the ``__get__`` of a descriptor, which has their name.
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
    """A tensor that was written to, as a buffer for several gradients, is a part from here on."""
    if name != "__setitem__" and (not name.endswith("_") or name.endswith("__")):
        return
    for target in args[0] if isinstance(args[0], (tuple, list)) else args[:1]:
        # Not a weight, nor a view of one.
        if type(target) is Tensor and target.ndim and target._base is None and not target.requires_grad:
            set_class(target, PartialGradient)


def _marked(found: Tensor, in_columns: bool) -> Tensor:
    """A result as a part of gradients, unless it is a number."""
    if found.ndim:
        found = found.as_subclass(PartialGradient)
        found.in_columns = in_columns
    return found


def _mixes_elements(name: str, given: _Given) -> bool:
    """Tell whether an operation goes over the dimension where gradients, also stacked ones, have their elements."""
    args = given.args
    kwargs = given.kwargs
    if name in _PRODUCTS and len(args) > 1:
        # Weights [tasks] @ gradients [tasks, elements] work on each element by itself; so do columns @ weights.
        if isinstance(args[0], PartialGradient):
            return not given.in_columns or isinstance(args[1], PartialGradient)
        return given.in_columns or args[1].ndim < 2
    if name not in _OVER or not args or not isinstance(args[0], Tensor):
        return name in _ACROSS
    place, dim = _OVER[name]
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else dim))
    if isinstance(dim, Tensor):  # another tensor, as for torch.max
        return False
    if dim is None and name in ("quantile", "nanquantile"):
        return True
    elements = (0, -args[0].ndim) if given.in_columns else (-1, args[0].ndim - 1)
    return any(each in elements for each in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _is_computed(found: object, args: tuple[Any, ...]) -> bool:
    """Tell whether a result is a new tensor; operations in place return what they were given."""
    return type(found) is Tensor and all(found is not each for each in args)


def _is_number(found: Tensor, name: str, given: _Given) -> bool:
    """Tell whether a result is one number that was made of several elements."""
    # ``any`` and ``all`` are tests.
    if found.numel() != 1 or found.dtype == torch.bool:
        return False
    if found.ndim and (given.numel == 1 or name.startswith("_foreach_")):  # an element of one that has no others
        return False
    # A part of what was given is an element of it.
    return not any(isinstance(each, Tensor) and storage_id(found) == storage_id(each) for each in given.args)


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
    found.device = gradient.device
    found.dtype = gradient.dtype
    return found


def _plain(tensor: Tensor) -> Tensor:
    with unguarded():
        return tensor.as_subclass(Tensor)
