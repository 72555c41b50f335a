"""Norms of gradients that are spread over ranks, and scaling by them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeropp.engine.engine import Engine
from zeropp.optimizer.step_sync import Verdict

__all__ = [
    "MARKER_GRADIENT",
    "NOTHING",
    "GradientNorms",
    "clip_divisor",
    "clipping",
    "gradient_norms",
    "may_leave_out",
    "scale_gradients",
    "takes_divisor",
]

NOTHING = "<nothing>"  # the name in groups of what is no part of a parameter
MARKER_GRADIENT = 1e-30  # not zero, since some loops set gradients of zero to None; too small to change a sum
_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def scale_gradients(engine: Engine, norm: Tensor, max_norm: float) -> Tensor:
    """Multiply all gradients by at most ``max_norm / norm``, and by no more than 1; returns the factor."""
    # On the device: the host does not learn the factor, and so does not wait for it.
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    for gradient in engine.gradients:
        gradient.shard.mul_(factor.to(gradient.shard))
    return factor


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """By what gradients of a norm are divided so that it is at most ``max_norm``: a float32 scalar, at least 1."""
    return torch.clamp((norm + _EPSILON) / max_norm, min=1.0).float()


def may_leave_out(engine: Engine, optimizer: Optimizer) -> bool:
    """Tell whether a step of ``optimizer`` changes nothing at all, states included, where the device says so."""
    # SGD's fused step leaves out the first momentum, too, and takes uninitialised memory for it.
    adam = inspect.unwrap(type(optimizer).step) is inspect.unwrap(torch.optim.Adam.step)
    return adam and takes_divisor(engine, optimizer)


def takes_divisor(engine: Engine, optimizer: Optimizer | None) -> bool:
    """Tell whether kernels can divide gradients as they read them: an optimizer's, or for None the host's own."""
    # The divisor is float32, which is too little for gradients of 64 bits.
    single = all(gradient.dtype == torch.float32 for gradient in engine.gradients)
    if optimizer is None:
        return single
    # A state that was saved by an optimizer that is not fused brings that setting with it.
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return single and fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextlib.contextmanager
def clipping(
    engine: Engine, optimizer: Optimizer, norm: Tensor, max_norm: float, left_out: Tensor | None = None
) -> Iterator[None]:
    """Steps of ``optimizer`` inside clip gradients to ``max_norm``, all of them together; 0 for no clipping.

    Args:
        engine: whose gradients have that norm.
        optimizer: one that divides gradients by a scale while it reads them, as torch's fused ones do for GradScaler,
            saves a pass over them. It leaves them divided.
        norm: float64 scalar.
        max_norm: bound.
        left_out: float32 scalar, 1 where steps inside are to change nothing; of an optimizer that `may_leave_out`.
    """
    if left_out is None and not (max_norm > 0 and takes_divisor(engine, optimizer)):
        if max_norm > 0:
            scale_gradients(engine, norm, max_norm)
        yield
        return
    # Names that torch's GradScaler has given them.
    none = torch.zeros((), dtype=torch.float32, device=norm.device)
    optimizer.found_inf = none if left_out is None else left_out  # type: ignore[attr-defined]
    if max_norm > 0:
        optimizer.grad_scale = clip_divisor(norm, max_norm)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
        if max_norm > 0:
            del optimizer.grad_scale  # type: ignore[attr-defined]
            # They are divided now, and their versions do not say so.
            for gradient in engine.gradients:
                gradient.doubt()


class GradientNorms(dict[str, float]):
    """Norms by name. The markers at the end of each group have one, too, as loops over names and tensors ask for it."""

    def __missing__(self, name: str) -> float:
        if name == NOTHING:
            return MARKER_GRADIENT
        raise KeyError(name)


def gradient_norms(engine: Engine, verdict: Verdict) -> GradientNorms:
    """Norm of each parameter's gradient by its name, for those that have one. Collective: one sum of 8 bytes each."""
    names: list[str] = []
    squares: list[Tensor] = []
    for unit in engine.units:
        used = iter(verdict.used[unit.index])
        for buffer in unit.trainable_buffers:
            gradient = buffer.gradient
            assert gradient is not None  # the buffer is trainable
            own = torch.zeros(len(buffer.names), dtype=torch.float64, device=engine.device)
            # Replicas hold the same sums; the first one's count.
            for fragment in buffer.fragments() if gradient.arrived and gradient.placement.replica == 0 else ():
                part = gradient.shard[fragment.offset : fragment.offset + fragment.stop - fragment.start]
                own[fragment.slot] += part.double().square().sum()
            # Used on any rank, so that every rank brings as many numbers; this one's may be zeros.
            found = [index for index in range(len(buffer.names)) if next(used)]
            names += [buffer.names[index] for index in found]
            squares.append(own[found])
    total = torch.cat(squares) if squares else torch.zeros(0, dtype=torch.float64, device=engine.device)
    if total.numel():
        with engine.agreement.watching("adding up norms of parameters", call="grad_norms()"):
            engine.comm.sum(total)
    return GradientNorms(zip(names, total.sqrt().tolist(), strict=True))
