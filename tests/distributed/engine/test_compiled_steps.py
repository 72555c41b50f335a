"""``torch.compile`` of functions that contain a whole training step: graphs break at hooks, and results stay equal."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks


def model() -> nn.Module:
    """Return a float64 model of three linear layers, in which one weight is frozen.

    With the persistence threshold of 10 elements that `compiled` sets, the three biases and the last weight are
    persistent.
    """
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
    made[1][1].weight.requires_grad_(False)
    return made.double()


def backward(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    loss: Tensor = m(x).square().mean()
    loss.backward()
    return loss


def whole_step(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    o.zero_grad()
    loss = backward(m, o, x)
    o.step()
    with torch.no_grad():
        return loss + m(x).sum()


def by_optimizer(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    loss: Tensor = m(x).square().mean()
    o.backward(loss)
    norm = o.clip_grad_norm_(0.1)
    o.step()
    o.zero_grad()
    return loss * 2 + norm


def closure(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    def compute() -> Tensor:
        o.zero_grad()
        return backward(m, o, x)

    found: Tensor = o.step(compute)
    return found


def held(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    with o.no_sync():
        loss = backward(m, o, x)
    loss = loss + backward(m, o, 2 * x)
    for group in o.param_groups:
        group["lr"] = group["lr"] * 0.9
    o.step()
    o.zero_grad()
    return loss * 2


def by_hand(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    """Take a step, set each gradient to None, and multiply the loss by the number of elements of all parameters.

    The compiled function reads the parameters between passes, while they are resharded.
    """
    loss = whole_step(m, o, x)
    for parameter in m.parameters():
        parameter.grad = None
    return loss * sum(parameter.numel() for parameter in m.parameters())


def asked(m: nn.Module, o: Any, x: Tensor) -> Tensor:
    loss: Tensor = m(x).square().mean()
    x = x.detach().requires_grad_()
    penalty = torch.autograd.grad(m(x).sum(), x)[0].square().sum()
    weight = torch.autograd.grad(loss, m[2].weight, retain_graph=True)[0].norm()
    (loss * (1 + weight.detach())).backward()
    o.step()
    o.zero_grad()
    return loss + penalty


class Plain:
    """A torch optimizer with the methods that ZeroOptimizer adds: ``no_sync``, ``backward`` and ``clip_grad_norm_``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.no_sync = optimizer, contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, most: float) -> Tensor:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, most)


FUNCTIONS = {f.__name__: f for f in (backward, whole_step, by_optimizer, closure, held, by_hand, asked)}


def compiled(function: Callable[..., Tensor], stage: int, backend: str, inner: bool) -> float:
    """Run a compiled function three times on one batch, and the plain function on a plain copy of the model.

    Args:
        function: value of FUNCTIONS.
        stage: ZeRO stage.
        backend: backend of torch.compile.
        inner: True to compile a submodule by itself, too.

    Returns:
        Largest difference of results and of weights at the end.
    """
    torch._dynamo.reset()
    ours = model()
    plain = copy.deepcopy(ours)
    config = make_config(stage=stage, persist=10)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours, config)
    reference = Plain(torch.optim.SGD(plain.parameters(), lr=0.1))
    if inner:
        ours[1].compile(backend=backend)
    step, x, off = torch.compile(function, backend=backend), torch.randn(4, 8).double(), 0.0
    torch.distributed.broadcast(x, 0)
    for _ in range(3):
        off = max(off, float((step(ours, optimizer, x) - function(plain, reference, x)).abs().max()))
        if function is backward:
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
    return max(off, worst(zeropp.full_state(ours), plain.state_dict()))


@pytest.mark.every(40)
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(("stage", "backend"), [(0, "eager"), (1, "aot_eager"), (2, "eager"), (3, "aot_eager")])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_step(name: str, stage: int, backend: str, inner: bool) -> None:
    assert max(run_ranks(2, compiled, FUNCTIONS[name], stage, backend, inner, timeout=120)) < 1e-10


def failing(message: str) -> tuple[str, str]:
    """Raise an error of torch's compiler in an exchange between ranks, and in a backward hook of the user.

    Args:
        message: text of the error.

    Returns:
        The error that backward raises in each of the two cases.
    """

    def fail(*args: object, **kwargs: object) -> None:
        raise torch._dynamo.exc.InternalTorchDynamoError(message)

    ours = model()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours, make_config(warn_after=None))
    with mock.patch.object(type(optimizer.engine.comm), "all_gather_ints", fail), pytest.raises(RuntimeError) as inside:
        ours(torch.ones(4, 8).double()).sum().backward()
    ours = model()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours, make_config(warn_after=None))
    ours[2].register_full_backward_hook(fail)
    with pytest.raises(RuntimeError) as outside:
        ours(torch.ones(4, 8).double()).sum().backward()
    return str(inside.value), str(outside.value)


def test_an_error_of_the_compiler_is_not_taken_for_a_timeout() -> None:
    message = "the words timed out and connection closed in a line of code"
    for inside, outside in run_ranks(2, failing, message):
        assert message in inside and "hang_timeout" not in inside and "until a connection" not in inside
        assert outside.startswith(message)


def traced(stage: int) -> list[str]:
    ours = model()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours, make_config(stage=stage))
    x, said = torch.ones(4, 8).double(), []
    for call in (backward, by_optimizer):
        with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(RuntimeError) as error:
            torch.compile(call, backend="eager")(ours, optimizer, x)
        said.append(str(error.value))
    loss = ours(x).square().mean()
    context = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with context, pytest.raises(RuntimeError) as error:
        optimizer.backward(loss)
    whole_step(ours, optimizer, x)  # a refused backward must leave nothing behind that stops the next step
    return [*said, str(error.value)]


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [3, 0])
def test_compiled_autograd_is_refused_by_name(stage: int) -> None:
    for said in run_ranks(2, traced, stage, timeout=120):
        assert all(text.startswith("compiled autograd is on") for text in said), said
