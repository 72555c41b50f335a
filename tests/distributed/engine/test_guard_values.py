"""Uses and edits of weights and gradients outside a pass raise an error that names a remedy, and nothing crashes.

Operations run on ranks of the pool. If an operation crashed its process, the failure message would quote the name of
the operation.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import zeropp
from tests.support.branching_models import make_config, shards
from tests.support.rank_pool import run_ranks
from tests.support.resharded_model import PERSIST, Use, attempt, held, still_trains
from tests.support.sharded_and_plain import Pair
from zeropp.params.guard import is_guarded


def assign(name: str, make: Callable[[nn.Parameter], object]) -> Use:
    return lambda p: setattr(p, name, make(p))


def fresh(p: nn.Parameter) -> Tensor:
    return torch.zeros(p.shape, dtype=p.dtype)


def under_no_grad(use: Use) -> Use:
    def run(p: nn.Parameter) -> object:
        with torch.no_grad():
            return use(p)

    return run


def summed(named: dict[str, Tensor]) -> Tensor:
    """Return the sum of all values. This is a user's function that calls torch's overrides for tensors in a dict."""
    if has_torch_function(tuple(named.values())):
        result: Tensor = handle_torch_function(summed, tuple(named.values()), named)
        return result
    return torch.stack([value.sum() for value in named.values()]).sum()


VALUES: dict[str, Use] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "neg": lambda p: -p,
    "matmul": lambda p: p @ p.T,
    "equal": lambda p: torch.equal(p, p),
    "compare": lambda p: p == p,
    "bool": lambda p: bool(p),
    "float": lambda p: float(p),
    "item": lambda p: p.item(),
    "tolist": lambda p: p.tolist(),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "contains": lambda p: 3 in p,
    "format": lambda p: f"{p.sum():.3f}",
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "mT": lambda p: p.mT,
    "unbind": lambda p: p.unbind(),
    "numpy": lambda p: p.numpy(),
    "asarray": lambda p: np.asarray(p),
    "np.array": lambda p: np.array(p),
    "dlpack": lambda p: p.__dlpack__(),
    "from_dlpack": lambda p: torch.from_dlpack(p),
    "np.from_dlpack": lambda p: np.from_dlpack(p),
    "storage": lambda p: p.storage(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "data_ptr": lambda p: p.data_ptr(),
    "share_memory": lambda p: p.share_memory_(),
    "to": lambda p: p.to(torch.float64),
    "to_same": lambda p: p.to("cpu"),
    "cpu": lambda p: p.cpu(),
    "double": lambda p: p.double(),
    "type": lambda p: p.type(torch.float64),
    "type by keyword": lambda p: p.type(dtype=torch.float64),
    "dict": lambda p: summed({"parameter": p}),
    "contiguous": lambda p: p.contiguous(),
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "linalg": lambda p: torch.linalg.vector_norm(p),
    "isfinite": lambda p: torch.isfinite(p).all(),
    "foreach": lambda p: torch._foreach_norm([p]),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p]),
    "zeros_like_filled": lambda p: torch.zeros(p.shape).copy_(p),
    "where": lambda p: torch.where(torch.ones(p.shape, dtype=torch.bool), p, p),
    "out": lambda p: torch.add(torch.zeros(p.shape), 1, out=p),
    "as_tensor": lambda p: torch.as_tensor(p) + 0,
    "asarray_torch": lambda p: torch.asarray(p, requires_grad=True) + 0,  # else torch 2.11 freezes its argument
    "Parameter": lambda p: nn.Parameter(p),
    "linear": lambda p: F.linear(torch.zeros(1, p.shape[-1]), p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "unvector": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "pickle": lambda p: pickle.dumps(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "grad": lambda p: torch.autograd.grad(p.sum(), [p]),
    "backward": lambda p: p.backward(fresh(p)),
    "functional_call": lambda p: torch.func.functional_call(nn.Linear(8, 8), {"weight": p}, (torch.zeros(1, 8),)),
}
EDITS: dict[str, Use] = {
    "add_": under_no_grad(lambda p: p.add_(1)),
    "iadd": under_no_grad(lambda p: p.__iadd__(1)),
    "fill_": under_no_grad(lambda p: p.fill_(1)),
    "zero_": under_no_grad(lambda p: p.zero_()),
    "copy_": under_no_grad(lambda p: p.copy_(fresh(p))),
    "setitem": under_no_grad(lambda p: p.__setitem__(0, 0.0)),
    "clamp_": under_no_grad(lambda p: p.clamp_(0)),
    "resize_": under_no_grad(lambda p: p.resize_(1)),
    "foreach_add_": under_no_grad(lambda p: torch._foreach_add_([p], 1)),
    "foreach_copy_": under_no_grad(lambda p: torch._foreach_copy_([p], [fresh(p)])),
    "data_set": assign("data", fresh),
    "init.normal_": lambda p: nn.init.normal_(p),
    "init.zeros_": lambda p: nn.init.zeros_(p),
    "init.xavier": lambda p: nn.init.xavier_uniform_(p),
    "init.orthogonal": lambda p: nn.init.orthogonal_(p),
    "init.kaiming": lambda p: nn.init.kaiming_uniform_(p, a=5**0.5),
    "init.trunc": lambda p: nn.init.trunc_normal_(p),
    "init.constant": lambda p: nn.init.constant_(p, 1.0),
    "detach_": under_no_grad(lambda p: p.detach_()),
    "squeeze_": under_no_grad(lambda p: p.squeeze_()),
    "t_": under_no_grad(lambda p: p.t_()),
    "own_optimizer": lambda p: torch.optim.SGD([stepped(p)], lr=1.0).step(),
}


def stepped(p: nn.Parameter) -> nn.Parameter:
    """Return a parameter whose gradient the user has set by hand, as if to step it with a plain optimizer."""
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    return p


# Functions for which torch does not call __torch_function__. Each has a test of its own, which a crash would name.
UNASKED: dict[str, Use] = {
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.Tensor": lambda p: torch.Tensor(p) + 0,
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
    "set_": under_no_grad(lambda p: p.set_(fresh(p))),
    "setstate": lambda p: p.__setstate__((torch.zeros(64).untyped_storage(), 0, p.shape, (8, 1))),
}
READS = ("torch.tensor", "torch.Tensor", "vmap")
GRADIENTS: dict[str, Use] = {
    "read": lambda p: p.grad,
    "write": assign("grad", fresh),
    "scale": lambda p: p.grad.mul_(2),
    "clip_norm": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "total_norm": lambda p: nn.utils.get_total_norm([p.grad]),
}


def touch(table: str, persist: int, who: list[int], before_first_pass: bool) -> tuple[list[str], float]:
    """Try every operation of a table on some ranks.

    Args:
        table: "values" or "edits".
        persist: persistence threshold in elements.
        who: ranks that try the operations.
        before_first_pass: True to try them before the first forward.

    Returns:
        Operations that were not refused with a remedy, and the largest difference of weights from plain torch after one
        more step.
    """
    uses = {"values": VALUES, "edits": EDITS}[table]
    pair = held(persist)
    if not before_first_pass:
        with torch.no_grad():
            pair.model(torch.zeros(1, 8))
    wrong = []
    if not dist.is_initialized() or dist.get_rank() in who:
        pieces = shards(pair.optimizer)
        for name, use in uses.items():
            for path in ("first.weight", "last.weight"):
                parameter = pair.model.get_parameter(path)
                complaint = attempt(f"{name} of {path}", lambda p=parameter, u=use: u(p))
                if complaint:
                    wrong.append(complaint)
                if parameter.grad is not None:
                    parameter.grad = None
        if not all(map(torch.equal, pieces, shards(pair.optimizer))):
            wrong.append("the weights of this rank have changed")
    return wrong, still_trains(pair)


@pytest.mark.every(5)
@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("kind", PERSIST)
@pytest.mark.parametrize("table", ["values", "edits"])
def test_values_outside_a_pass_are_refused(table: str, kind: str, who: list[int]) -> None:
    for rank, (wrong, off) in enumerate(run_ranks(2, touch, table, PERSIST[kind], who, who == [1])):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
        assert off < 1e-6


class Copying(nn.Module):
    """A model whose forward first passes the last block's weight to ``use``, before that unit has been gathered."""

    use: Use | None = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.use is not None:
            self.use(self.blocks[3].weight)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def parameters_made_in_a_pass() -> tuple[list[str], float]:
    """Make tensors of a released parameter inside a pass.

    ``nn.Parameter(p)`` is refused. ``p.detach()`` gives a plain tensor, ``nn.Parameter(p.detach().clone())`` a copy.

    Returns:
        Errors of the copies, and the largest difference of weights from plain torch after one more step.
    """
    torch.manual_seed(5)
    pair = Pair(Copying(), make_config(hang_timeout=10), dtype=torch.float32)
    weight, whole = pair.model.blocks[3].weight, zeropp.full_state(pair.model)["blocks.3.weight"]
    wrong, made = [], list[Tensor]()

    def use(p: nn.Parameter) -> None:
        assert is_guarded(p)
        with pytest.raises(RuntimeError, match=r"Creating a Parameter .* requires that detach\(\) returns"):
            nn.Parameter(p)
        made.extend((p.detach(), nn.Parameter(p.detach().clone())))

    pair.model.use = use
    pair.model(torch.zeros(1, 8))
    del pair.model.use
    detached, copied = made
    wrong += [] if type(detached) is Tensor else [f"p.detach() is a {type(detached).__name__}"]
    wrong += [] if type(copied) is nn.Parameter and torch.equal(copied, whole) else ["another copy"]
    wrong += [] if is_guarded(weight) else ["not released"]
    return wrong, still_trains(pair)


def test_parameters_of_released_ones_in_a_pass() -> None:
    for wrong, off in run_ranks(2, parameters_made_in_a_pass):
        assert not wrong and off < 1e-6


@pytest.mark.campaign
def test_values_are_refused_on_a_single_rank() -> None:
    for table in ("values", "edits"):
        for wrong, off in run_ranks(1, touch, table, 20, [0], False, init=False):
            assert not wrong, "\n".join(wrong)
            assert off < 1e-6


def unasked(name: str, persist: int) -> tuple[str, float]:
    pair = held(persist)
    found: list[object] = []
    complaint = attempt(name, lambda: found.append(UNASKED[name](pair.model.get_parameter("first.weight"))))
    if name in READS and found:
        assert torch.isnan(found[0]).all(), "values that should not be there"  # type: ignore[arg-type]
    if name == "set_":
        with pytest.raises(RuntimeError, match=r"first\.weight.*edited in place, and the edit is lost"):
            pair.model(torch.zeros(1, 8))
    return complaint, still_trains(pair)


@pytest.mark.every(6)
@pytest.mark.parametrize("kind", PERSIST)
@pytest.mark.parametrize("name", UNASKED)
def test_ways_past_torch_function(name: str, kind: str) -> None:
    """Reads give NaN, an edit raises an error in the next forward, and main weights stay as they are."""
    ((complaint, off),) = run_ranks(1, unasked, name, PERSIST[kind], init=False)
    assert "gave" in complaint or not complaint
    assert off < 1e-6


def gradients(persist: int, who: list[int]) -> tuple[list[str], float]:
    """Use ``.grad`` of parameters between backward and step on some ranks.

    The gradient is sharded there, so reading ``.grad`` must raise an error instead of returning None.

    Args:
        persist: persistence threshold in elements.
        who: ranks that use ``.grad``.

    Returns:
        Uses that were not refused with a remedy, and the largest difference of weights from plain torch after one more
        step.
    """
    pair = held(persist)
    pair.model(torch.randn(2, 8)).square().mean().backward()
    wrong = []
    if dist.get_rank() in who:
        for name, use in GRADIENTS.items():
            for path in ("first.weight", "last.bias"):
                parameter = pair.model.get_parameter(path)
                complaint = attempt(f"{name} of {path}", lambda p=parameter, u=use: u(p))
                wrong += [complaint] if complaint else []
        complaint = attempt("clip all", lambda: nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0))
        wrong += [complaint] if complaint else []
    pair.optimizer.zero_grad()
    wrong += [f"{path} has a gradient" for path, p in pair.model.named_parameters() if p.grad is not None]
    return wrong, still_trains(pair)


@pytest.mark.every(5)
@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("kind", PERSIST)
def test_gradients_between_backward_and_step_are_refused(kind: str, who: list[int]) -> None:
    for rank, (wrong, off) in enumerate(run_ranks(2, gradients, PERSIST[kind], who)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
        assert off < 1e-6


def explained_while_managed(stage: int) -> tuple[list[str], nn.Parameter]:
    """Collect the errors of refused uses of a model and its weight.

    Args:
        stage: ZeRO stage.

    Returns:
        The weight's repr and the error messages, and the weight, which outlives its engine.
    """
    model = nn.Linear(4, 4).double()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(stage=stage))
    x = torch.ones(2, 4).double().requires_grad_()
    model(x).sum().backward()
    uses: list[Callable[[], object]] = [
        (lambda: model.weight.sum()) if stage == 3 else (lambda: model.weight.zero_()),
        lambda: model.weight.grad,
        lambda: setattr(model.weight, "grad", torch.ones(4, 4).double()),
        lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True),
        lambda: model.half(),
        lambda: copy.deepcopy(model),
        lambda: model.state_dict(keep_vars=True),
        lambda: model.load_state_dict({}, assign=True),
    ]
    said = [repr(model.weight)]
    for use in uses:
        with pytest.raises(RuntimeError) as error:
            use()
        said.append(str(error.value))
    assert optimizer.engine.units
    return said, model.weight


def explained(stage: int) -> list[str]:
    """Return the messages of `explained_while_managed`, and the weight's error after its engine is gone."""
    said, weight = explained_while_managed(stage)
    gc.collect()  # errors and their frames are reference cycles that keep the engine alive
    with pytest.raises(RuntimeError, match="the engine that kept them is gone") as error:
        weight.sum()
    return [*said, str(error.value)]


@pytest.mark.every(5)
@pytest.mark.parametrize("stage", [2, 0, 1, 3])
def test_errors_do_not_mention_partitions_or_released_weights(stage: int) -> None:
    for said in run_ranks(2, explained, stage):
        assert not [text for text in said if "partition" in text or "released" in text]
