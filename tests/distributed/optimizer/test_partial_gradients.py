"""Gradients in ``optimizer.param_groups`` refuse norms of a rank's part; all else works as on plain tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks
from zeropp.optimizer import partial_gradient

SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 3": {}, "persistent": {"persist": 10**6},
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


def stacked(ps: list[nn.Parameter]) -> Tensor:
    """Return the flattened gradients of two tasks as rows, [2, numel], as multi-task methods compare them."""
    flat = torch.cat([p.grad.flatten() for p in ps if p.grad is not None])
    return torch.stack([flat, 2 * flat])


def columns(ps: list[nn.Parameter]) -> Tensor:
    """Return the flattened gradients of two tasks as columns, [numel, 2]."""
    return torch.stack(list(stacked(ps)), dim=1)


def buffer(ps: list[nn.Parameter]) -> Tensor:
    flat, start = torch.zeros(sum(p.numel() for p in ps)), 0
    for p in ps:
        if p.grad is not None:
            flat[start : start + p.numel()] = p.grad.flatten()
        start += p.numel()
    return flat


NORMS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip": lambda ps: clip_grad_norm_(ps, 1.0),
    "clip inf": lambda ps: clip_grad_norm_(ps, 1.0, norm_type=float("inf")),
    "clip foreach": lambda ps: clip_grad_norm_(ps, 1.0, foreach=True),
    "total": lambda ps: get_total_norm([p.grad for p in ps if p.grad is not None]),
    "method": lambda ps: [p.grad.norm() for p in ps if p.grad is not None],
    "data": lambda ps: [p.grad.data.norm(2) for p in ps if p.grad is not None],
    "detached": lambda ps: [torch.norm(p.grad.detach().float(), 2) for p in ps if p.grad is not None],
    "scaled": lambda ps: [torch.linalg.norm(2.0 * p.grad) for p in ps if p.grad is not None],
    "joined": lambda ps: torch.cat([p.grad.flatten() for p in ps if p.grad is not None]).norm(),
    "squares": lambda ps: sum(p.grad.square().sum() for p in ps if p.grad is not None),
    "product": lambda ps: [torch.dot(p.grad, p.grad) for p in ps if p.grad is not None],
    "largest": lambda ps: [p.grad.abs().max() for p in ps if p.grad is not None],
    "kept dimension": lambda ps: [p.grad.square().sum(0, keepdim=True) for p in ps if p.grad is not None],
    "largest in a dimension": lambda ps: [p.grad.max(0) for p in ps if p.grad is not None],
    "variance": lambda ps: [torch.var_mean(p.grad) for p in ps if p.grad is not None],
    "foreach": lambda ps: torch._foreach_max([p.grad for p in ps if p.grad is not None]),
    "matrix product": lambda ps: [p.grad.view(1, -1) @ p.grad.view(-1, 1) for p in ps if p.grad is not None],
    "gram matrix": lambda ps: stacked(ps) @ stacked(ps).t(),
    "rows": lambda ps: stacked(ps).square().sum(1),
    "rows kept": lambda ps: stacked(ps).mean(axis=(-1,), keepdim=True),
    "cosine": lambda ps: nn.functional.cosine_similarity(stacked(ps), stacked(ps), dim=1),
    "largest few": lambda ps: stacked(ps).topk(1),
    "running sum": lambda ps: [p.grad.cumsum(0) for p in ps if p.grad is not None],
    "entries": lambda ps: [torch.count_nonzero(p.grad) for p in ps if p.grad is not None],
    "counted": lambda ps: [(p.grad.abs() > 0.1).sum() for p in ps if p.grad is not None],
    "share of signs": lambda ps: [(p.grad > 0).float().mean() for p in ps if p.grad is not None],
    "sum by name": lambda ps: [torch.sum(input=p.grad) for p in ps if p.grad is not None],
    "index": lambda ps: [p.grad.argmax() for p in ps if p.grad is not None],
    "columns": lambda ps: columns(ps).sum(0),
    "transposed": lambda ps: stacked(ps).T.mean(dim=0),
    "products of columns": lambda ps: columns(ps).t() @ columns(ps),
    "products of vectors": lambda ps: torch.linalg.vecdot(stacked(ps), stacked(ps)),
    "singular values": lambda ps: torch.linalg.svd(stacked(ps), full_matrices=False),
    "written to a buffer": lambda ps: buffer(ps).norm(),
    "copied": lambda ps: torch.cat(copy.deepcopy([p.grad.flatten() for p in ps if p.grad is not None])).norm(),
    "running mean": lambda ps: [torch.zeros_like(p.data).add_(p.grad).norm() for p in ps if p.grad is not None],
    "medians": lambda ps: stacked(ps).median(dim=0).values.norm(),
    "sorted": lambda ps: [torch.msort(p.grad) for p in ps if p.grad is not None],
    "histogram": lambda ps: [torch.histogram(p.grad, 4) for p in ps if p.grad is not None],
    "columns side by side": lambda ps: torch.column_stack(list(stacked(ps))).sum(0),
    "columns joined": lambda ps: torch.cat([row[:, None] for row in stacked(ps)], 1).std(0),
    "columns by permute": lambda ps: stacked(ps).permute(1, 0).sum(0),
    "rows of data": lambda ps: stacked(ps).data.sum(1),
    "compiled": lambda ps: torch.compile(torch.square, backend="eager")(ps[0].grad).norm(),
    "normalized": lambda ps: [nn.functional.normalize(p.grad, dim=0) for p in ps if p.grad is not None],
}


def make_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 3))


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def make_sharded(settings: dict[str, Any], cls: Any = torch.optim.AdamW) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    model = make_model()
    return model, zeropp.ZeroOptimizer(cls(model.parameters(), lr=0.1), model, make_config(**settings))


def tensors(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def norms(settings: dict[str, Any]) -> dict[str, str]:
    """Return the error of each computation in NORMS ("" for none): before a step, after it, and in the next window."""
    model, optimizer = make_sharded(settings)
    found = {}
    for when in ("before a step", "after it", "later"):
        if when != "after it":
            optimizer.zero_grad()
            model(batch(0)).square().sum().backward()
        for name, norm in NORMS.items():
            try:
                norm(tensors(optimizer))
                found[f"{name} {when}"] = ""
            except RuntimeError as error:
                found[f"{name} {when}"] = str(error)
        if when == "before a step":
            optimizer.step()
    return found


@pytest.mark.every(5)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["stage 1", "stage 3", "persistent", "offload"])
def test_norms_of_parts_are_refused_on_every_rank(name: str, world: int) -> None:
    for found in run_ranks(world, norms, SETTINGS[name]):
        assert all("optimizer.clip_grad_norm_(max_norm)" in text for text in found.values()), found


@pytest.mark.parametrize(("name", "world"), [("stage 0", 2), ("stage 3", 1)])
def test_norms_are_given_where_a_rank_has_all(name: str, world: int) -> None:
    for found in run_ranks(world, norms, SETTINGS[name]):
        assert not any(found.values()), found


def trained(settings: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return the weights after steps whose gradients are clipped by value, scaled and replaced.

    Args:
        settings: settings of the configuration; None for plain torch.
    """
    if settings is None:
        model = make_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        model, optimizer = make_sharded(settings)
    for step in range(4):
        model(batch(step)).square().sum().backward()
        clip_grad_value_(tensors(optimizer), 0.5, foreach=bool(step % 2) or None)
        for parameter in tensors(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                parameter.grad = parameter.grad + 0.01 * parameter.grad.sign()
                parameter.grad.data = parameter.grad.data * 0.9
                rows = torch.stack([parameter.grad.flatten(), parameter.grad.flatten()])
                merged = (rows.mean(0) + rows.median(0).values + rows.sort(dim=0).values[0]) / 3
                merged = torch.max(torch.full((2,), 0.5) @ rows, merged)
                in_columns = torch.stack([parameter.grad.flatten(), merged], dim=1)
                merged = (in_columns.mean(1) + in_columns @ torch.full((2,), 0.5) + in_columns.T.mean(0)) / 3
                merged = torch.where(merged > 0, merged, 0.5 * merged)
                merged = merged + 0.1 * torch.column_stack([merged, in_columns[:, 0]]).mean(1)
                hit = torch.arange(merged.numel()) == 0  # a selection of one element combines none, so it is allowed
                assert torch.masked_select(merged, hit).numel() == 1
                assert not merged.isnan().sum() and merged.isfinite().all()
                parameter.grad = merged.view_as(parameter.grad)
        for parameter in tensors(optimizer) if step % 2 else ():
            if parameter.grad is not None:
                parameter.grad.set_(parameter.grad * 0.8)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if settings is None else zeropp.full_state(model)


@pytest.mark.every(4)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_clipping_by_value_and_edits_are_as_in_plain_torch(name: str, world: int) -> None:
    wanted = trained(None)
    assert max(worst(found, wanted) for found in run_ranks(world, trained, SETTINGS[name])) < 1e-5


def kept() -> list[str]:
    """Return the class names of gradients loaded from a file, of a deep copy, and of a state made from a gradient."""
    model, optimizer = make_sharded(SETTINGS["stage 1"], torch.optim.SGD)
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    model(batch(0)).square().sum().backward()
    gradient = tensors(optimizer)[0].grad
    assert gradient is not None and not gradient.is_sparse and gradient.device == torch.device("cpu")
    assert gradient.dtype == torch.float32 and gradient.double().dtype == torch.float64
    file = io.BytesIO()
    torch.save([gradient, gradient * 2], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded[1], 2 * loaded[0]) and bool(gradient.any())
    optimizer.step()
    state = optimizer.state[tensors(optimizer)[0]]["momentum_buffer"]
    return [type(each).__name__ for each in (*loaded, copy.deepcopy(gradient), state)]


def test_files_and_states_have_plain_tensors() -> None:
    """Files and states have plain tensors. A copy in memory still refuses norms, as other results of gradients do."""
    assert run_ranks(2, kept) == [["Tensor", "Tensor", "PartialGradient", "Tensor"]] * 2


def scaled() -> tuple[dict[str, Tensor], int]:
    """Train with torch's GradScaler; return the weights and the number of ``__torch_function__`` calls on gradients."""
    model, optimizer = make_sharded(SETTINGS["stage 1"], torch.optim.SGD)
    scaler, calls = torch.amp.GradScaler("cpu", init_scale=8.0), [0]
    original = partial_gradient.PartialGradient.__torch_function__.__func__  # type: ignore[attr-defined]

    def counted(cls: type, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(cls, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_gradient.PartialGradient, "__torch_function__", classmethod(counted))
        for step in range(3):
            scaler.scale(model(batch(step)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return zeropp.full_state(model), calls[0]


def test_grad_scaler_pays_one_call_a_step() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, calls in run_ranks(2, scaled):
        assert worst(found, model.state_dict()) < 1e-5 and calls == 3
