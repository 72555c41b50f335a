"""Parameters whose values are elsewhere: metadata is true, everything else is refused or works, nothing crashes.

Each operation runs in the pool of ranks, so that a crash would show as a rank that died, with the operation's name.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import zeropp
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.shapes import Pair, Routed, apart, chain, make_config, shards, worst
from tests.owned import live_numel

REMEDY = ("state_dict", "full_state", "before wrapping", "optimizer.clip_grad_norm_", "optimizer.zero_grad")


class Held(nn.Module):
    """A partitioned part and, at the usual threshold, a persistent one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


Use = Callable[[nn.Parameter], object]


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
    """A function of the user's own that torch's overrides reach through a dict."""
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
    "asarray_torch": lambda p: torch.asarray(p, requires_grad=True) + 0,  # torch 2.11 freezes what it is given
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
    """A parameter with a gradient that its user made by hand, as if to step it with a plain optimizer."""
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    return p


# torch does not ask __torch_function__ here; each runs in a process of its own if it crashes.
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


def attempt(name: str, use: Callable[[], object]) -> str:
    """What came of it: "" for a RuntimeError that names a remedy, else a description."""
    print(f"trying {name}", file=sys.stderr, flush=True)  # the harness quotes it if this rank dies
    try:
        got = use()
    except RuntimeError as error:
        named = any(remedy in str(error) for remedy in REMEDY)
        return "" if named else f"{name}: RuntimeError without a remedy: {str(error)[:200]}"
    except BaseException as error:
        return f"{name}: {type(error).__name__}: {str(error)[:200]}"
    return f"{name}: gave {type(got).__name__}"


def managed(persist: int) -> tuple[nn.Module, zeropp.ZeroOptimizer, nn.Module]:
    torch.manual_seed(5)
    model = Held()
    plain = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(persist=persist, hang_timeout=10)
    )
    optimizer.engine.refresh.wait()
    return model, optimizer, plain


def still_trains(model: nn.Module, optimizer: zeropp.ZeroOptimizer, plain: nn.Module) -> float:
    """One step, and the largest difference from the same step of the plain model."""
    model.train()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [torch.randn(2, 8, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for batch in batches:
        (plain(batch).square().mean() / world).backward()
    plain_optimizer.step()
    optimizer.zero_grad()
    model(batches[rank]).square().mean().backward()
    optimizer.step()
    return worst(zeropp.full_state(model), plain.state_dict())


PERSIST = {"partitioned": 0, "persistent": 1000}


def touch(table: str, persist: int, who: list[int], before_first_pass: bool) -> tuple[list[str], float]:
    """Try every operation of a table on the ranks ``who``; complaints, and how far training is off afterwards."""
    uses = {"values": VALUES, "edits": EDITS}[table]
    model, optimizer, plain = managed(persist)
    if not before_first_pass:
        with torch.no_grad():
            model(torch.zeros(1, 8))
    wrong = []
    if not dist.is_initialized() or dist.get_rank() in who:
        pieces = shards(optimizer)
        for name, use in uses.items():
            for path in ("first.weight", "last.weight"):
                parameter = model.get_parameter(path)
                complaint = attempt(f"{name} of {path}", lambda p=parameter, u=use: u(p))
                if complaint:
                    wrong.append(complaint)
                if parameter.grad is not None:
                    parameter.grad = None
        if not all(map(torch.equal, pieces, shards(optimizer))):
            wrong.append("the weights of this rank have changed")
    return wrong, still_trains(model, optimizer, plain)


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("kind", PERSIST)
@pytest.mark.parametrize("table", ["values", "edits"])
def test_values_outside_a_pass_are_refused(table: str, kind: str, who: list[int]) -> None:
    for rank, (wrong, off) in enumerate(run_ranks(2, touch, table, PERSIST[kind], who, who == [1])):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
        assert off < 1e-6


def test_values_are_refused_on_a_single_rank() -> None:
    for table in ("values", "edits"):
        for wrong, off in run_ranks(1, touch, table, 20, [0], False, init=False):
            assert not wrong, "\n".join(wrong)
            assert off < 1e-6


def read_after_a_failure(who: list[int]) -> None:
    """A read on some ranks after backward has failed on all; and two more steps."""
    pair = Pair(Routed(3), make_config())
    pair.train(chain(3))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("of the user")

    first, second, third = pair.model.blocks
    hidden = second(first(pair.batch(pair.rank)))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        third(hidden).sum().backward()
    if pair.rank in who:
        with pytest.raises(RuntimeError, match="its values are partitioned"):
            first.lin.weight.sum()
    pair.zero_grad()
    pair.train(chain(3))
    pair.train(chain(3))
    pair.check()


@pytest.mark.parametrize("who", [[0], [0, 1]])
def test_values_are_refused_after_a_backward_that_failed(who: list[int]) -> None:
    run_ranks(2, read_after_a_failure, who)


def backward_after_a_failure(settings: dict[str, object], again: bool) -> tuple[bool, float]:
    """Two graphs; backward of the one fails, of the other follows at once; whether a step was taken."""
    pair = Pair(Routed(3), make_config(**settings))
    pair.train(chain(3))
    pair.zero_grad()
    first, second, third = pair.model.blocks
    hidden = second(first(pair.batch(pair.rank)))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("of the user")

    hidden.register_hook(fail)
    lost, kept = third(hidden).sum(), pair.model(pair.batch(pair.rank)).square().mean()
    with pytest.raises(ArithmeticError):
        lost.backward()
    if again:
        pair.optimizer.zero_grad()
    kept.backward()
    pair.optimizer.step()
    return pair.optimizer.step_was_taken, pair.optimizer.grad_norm


@pytest.mark.parametrize("settings", [{}, {"stage": 1}], ids=["3", "1"])
@pytest.mark.parametrize("again", [False, True])
def test_a_backward_of_another_graph_after_one_that_failed(settings: dict[str, object], again: bool) -> None:
    """It counts, or is refused by name where its weights were given up with the failed one's; it is never lost."""
    for result in run_ranks(2, backward_after_a_failure, settings, again, catch=True):
        if isinstance(result, RankFailure):
            assert result.is_a(RuntimeError)
            assert "needed for gradient computation has been modified by an inplace operation" in result.message
        else:
            taken, norm = result
            assert taken and norm > 0


class Peeking(nn.Linear):
    """Wants its present values while others are loaded."""

    def _load_from_state_dict(self, *args: object) -> None:
        torch.zeros(self.weight.shape).copy_(self.weight)
        super()._load_from_state_dict(*args)


def peek() -> float:
    model = Held()
    model.last = Peeking(8, 3)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    before = zeropp.full_state(model)
    with pytest.raises(RuntimeError, match=r"copy_ on parameter 'last\.weight': its values are partitioned"):
        model.load_state_dict(before)
    off = worst(zeropp.full_state(model), before)
    optimizer.close()
    return off


def test_values_are_refused_while_others_are_loaded() -> None:
    assert run_ranks(2, peek) == [0.0, 0.0]


def unasked(name: str, persist: int) -> tuple[str, float]:
    model, optimizer, plain = managed(persist)
    found: list[object] = []
    complaint = attempt(name, lambda: found.append(UNASKED[name](model.get_parameter("first.weight"))))
    if name in READS and found:
        assert torch.isnan(found[0]).all(), "values that should not be there"  # type: ignore[arg-type]
    if name == "set_":
        with pytest.raises(RuntimeError, match=r"first\.weight.*edited in place, and the edit is lost"):
            model(torch.zeros(1, 8))
    return complaint, still_trains(model, optimizer, plain)


@pytest.mark.parametrize("kind", PERSIST)
@pytest.mark.parametrize("name", UNASKED)
def test_ways_past_torch_function(name: str, kind: str) -> None:
    """They find NaN, or an edit that the next pass complains of and puts right; weights are not touched."""
    ((complaint, off),) = run_ranks(1, unasked, name, PERSIST[kind], init=False)
    assert "gave" in complaint or not complaint
    assert off < 1e-6


def gradients(persist: int, who: list[int]) -> tuple[list[str], float]:
    """Between backward and step the gradient is in the partition, so .grad must not answer None."""
    model, optimizer, plain = managed(persist)
    model(torch.randn(2, 8)).square().mean().backward()
    wrong = []
    if dist.get_rank() in who:
        for name, use in GRADIENTS.items():
            for path in ("first.weight", "last.bias"):
                parameter = model.get_parameter(path)
                complaint = attempt(f"{name} of {path}", lambda p=parameter, u=use: u(p))
                wrong += [complaint] if complaint else []
        complaint = attempt("clip all", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        wrong += [complaint] if complaint else []
    optimizer.zero_grad()
    wrong += [f"{path} has a gradient" for path, p in model.named_parameters() if p.grad is not None]
    return wrong, still_trains(model, optimizer, plain)


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("kind", PERSIST)
def test_gradients_between_backward_and_step_are_refused(kind: str, who: list[int]) -> None:
    for rank, (wrong, off) in enumerate(run_ranks(2, gradients, PERSIST[kind], who)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
        assert off < 1e-6


MODEL_USES: dict[str, Callable[[nn.Module], object]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda m: torch.save(m, io.BytesIO()),
    "to dtype": lambda m: m.to(torch.float64),
    "to device": lambda m: m.to("cpu"),
    "to meta": lambda m: m.to("meta"),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "cuda": lambda m: m.cuda(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "type": lambda m: m.type(torch.float64),
    "share_memory": lambda m: m.share_memory(),
    "reset": lambda m: m.apply(lambda x: x.reset_parameters() if hasattr(x, "reset_parameters") else None),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "child to": lambda m: m.first.to(torch.float64),
    "child deepcopy": lambda m: copy.deepcopy(m.first),
    "child pickle": lambda m: pickle.dumps(m.last),
    "keep_vars": lambda m: m.state_dict(keep_vars=True),
    "assign": lambda m: m.load_state_dict(Held().state_dict(), assign=True),
    "ema": lambda m: torch.optim.swa_utils.AveragedModel(m),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m.first),
    "spectral_norm": lambda m: nn.utils.parametrizations.spectral_norm(m.last),
}


def touch_model(persist: int, who: list[int]) -> tuple[list[str], float]:
    model, optimizer, plain = managed(persist)
    wrong = []
    if dist.get_rank() in who:
        for name, use in MODEL_USES.items():
            complaint = attempt(name, lambda u=use: u(model))
            wrong += [complaint] if complaint else []
    flags = {name: p.requires_grad for name, p in model.named_parameters() if not p.requires_grad}
    wrong += [f"{name} is frozen now" for name in flags]
    return wrong, still_trains(model, optimizer, plain)


@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("kind", PERSIST)
def test_moving_copying_and_pickling_the_model_are_refused(kind: str, who: list[int]) -> None:
    for rank, (wrong, off) in enumerate(run_ranks(2, touch_model, PERSIST[kind], who)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
        assert off < 1e-6


class Special(nn.Parameter):
    """A user's own class of parameter."""

    note = "kept"


ATTRIBUTES = (
    "names", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "is_ipu", "is_vulkan", "is_maia", "is_mtia",
    "retains_grad", "output_nr", "name", "_backward_hooks",
)  # fmt: skip
QUESTIONS = ("is_signed", "is_shared", "is_pinned", "is_inference", "has_names", "is_conj", "is_neg", "is_distributed")


def described(p: nn.Parameter) -> dict[str, object]:
    """Everything about a parameter that does not need its values."""
    return {
        "shape": tuple(p.shape),
        "size": tuple(p.size()),
        "size0": p.size(0),
        "numel": p.numel(),
        "torch.numel": torch.numel(p),
        "nelement": p.nelement(),
        "dtype": p.dtype,
        "device": p.device,
        "layout": p.layout,
        "dim": (p.dim(), p.ndim, p.ndimension()),
        "stride": p.stride(),
        "len": len(p),
        "requires_grad": p.requires_grad,
        "is_leaf": p.is_leaf,
        "grad": p.grad,
        "grad_fn": p.grad_fn,
        "itemsize": (p.itemsize, p.element_size(), p.nbytes),
        "contiguous": (p.is_contiguous(), p.is_contiguous(memory_format=torch.channels_last) if p.dim() == 4 else None),
        "kinds": (p.is_floating_point(), torch.is_floating_point(p), p.is_complex(), torch.is_complex(p)),
        "places": (p.is_cuda, p.is_cpu, p.is_meta, p.is_sparse, p.get_device(), p.is_quantized),
        "others": [getattr(p, name) for name in ATTRIBUTES if hasattr(Tensor, name)],
        "asked": [getattr(p, name)() for name in QUESTIONS if hasattr(Tensor, name)],
        "asked of torch": (torch.is_signed(p), torch.is_same_size(p, p), p.is_same_size(p)),
        "type": p.type(),
        "isinstance": (isinstance(p, nn.Parameter), isinstance(p, Tensor), torch.is_tensor(p), isinstance(p, Special)),
        "in dict": {p: 1}[p],
        "in set": len({p, p}),
        "is": p is p,
        "weakref": weakref.ref(p)() is p,
        "attribute": getattr(p, "mark", None),
        "note": getattr(p, "note", None),
    }


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.lin = nn.Linear(4, 5)
        self.own = Special(torch.ones(2, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.own.mark = "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.conv(x).mean((2, 3))).sum() * self.own.sum() * self.frozen.sum()


def metadata(persist: int) -> list[str]:
    model = Odd()
    before = {name: described(p) for name, p in model.named_parameters()}
    order = [name for name, _ in model.named_parameters()]
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model, make_config(persist=persist)
    )
    wrong = []
    for when in ("wrapped", "trained", "evaluated"):
        if when == "trained":
            model(torch.randn(1, 3, 4, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if when == "evaluated":
            with torch.no_grad():
                model(torch.randn(1, 3, 4, 4))
        assert [name for name, _ in model.named_parameters()] == order
        for name, parameter in model.named_parameters():
            after = described(parameter)
            wrong += [f"{when} {name}: {k} is {after[k]}, was {v}" for k, v in before[name].items() if after[k] != v]
            text = repr(parameter)
            if name not in text or str(tuple(parameter.shape)) not in text or str(parameter.dtype) not in text:
                wrong.append(f"{when}: repr of {name} is {text}")
            if str(parameter) != text or f"{parameter}" != text:
                wrong.append(f"{when}: str of {name} is {parameter!s}, formatted {parameter}")
    if "Linear(in_features=4" not in repr(model):
        wrong.append(f"repr of the model is {model!r}")
    return wrong


@pytest.mark.parametrize("kind", PERSIST)
def test_metadata_is_true_while_partitioned(kind: str) -> None:
    for wrong in run_ranks(2, metadata, PERSIST[kind]):
        assert not wrong, "\n".join(wrong)


# Inside a pass.


class Borrower(nn.Module):
    """Uses weights of its children by hand, in many ways, and some of them without calling the child at all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.store = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        store = self.store.weight
        x = self.blocks[0](x)
        x = F.linear(x, self.blocks[1].weight, self.blocks[1].bias)
        x = x @ store.T + store[0] + self.store.bias.detach()
        x = self.blocks[2](x) + self.blocks[2].weight.data.sum()
        for row in self.blocks[3].weight[:2]:
            x = x * (1 + row.tanh())
        x = x + F.linear(x, self.blocks[0].weight)  # again, after its module has run
        penalty = sum(p.square().sum() for p in self.parameters())
        return x.square().mean() + 1e-2 * penalty


class ByHand(nn.Module):
    """A parent that runs its child's operation itself, with a weight from elsewhere in the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(self.left(x), self.left[0].weight.t())
        return (self.right(y) + F.linear(y, self.right[0].weight + self.left[0].weight)).square().mean()


class Keeps(nn.Module):
    """Puts its loss on itself and returns nothing differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.last(torch.tanh(self.first(x))).square().mean()
        return self.loss.detach()


class Box:
    """Hides a tensor from anything that looks at attributes by name."""

    __slots__ = ("__weakref__", "hidden")

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = (lambda: hidden,)

    def open(self) -> Tensor:
        return self.hidden[0]()


class Boxed(nn.Module):
    """A child returns its output where no hook can find it: inside a closure in an object with slots."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Box:
            return Box(torch.tanh(self.lin(x)))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).open()
        return x.square().mean()


class Generates(nn.Module):
    """A child's forward is a generator: its body runs after its hooks."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lins = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
            for lin in self.lins:
                x = torch.tanh(lin(x)) + F.linear(x, lin.weight)
                yield x

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Inner() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = list(part(x))[-1]
        return x.square().mean()


class Checks(nn.Module):
    """The gradient with respect to the input, inside forward, and its square in the loss: backward twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


INSIDE: dict[str, tuple[type[nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "borrower": (Borrower, lambda m, x: m(x)),
    "by hand": (ByHand, lambda m, x: m(x)),
    "boxed": (Boxed, lambda m, x: m(x)),
    "generator": (Generates, lambda m, x: m(x)),
}


def compare(name: str, settings: dict[str, object]) -> tuple[float, float, float, int]:
    """Largest differences in loss and weights over three steps; elements still gathered at rest."""
    make, loss_of = INSIDE[name]
    torch.manual_seed(3)
    model = make().double()
    plain = copy.deepcopy(model)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model, make_config(**settings))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    off = 0.0
    for step in range(3):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss, wanted = loss_of(model, x), loss_of(plain, x)
        loss.backward()
        wanted.backward()
        off = max(off, apart(loss.detach(), wanted.detach()))
        optimizer.step()
        plain_optimizer.step()
    bound = settings.get("live", 10**9)
    return off, worst(zeropp.full_state(model), plain.state_dict()), float(bound), live_numel(optimizer.engine.units)


@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0, "live": 0}], ids=["default", "bare"])
@pytest.mark.parametrize("name", INSIDE)
def test_inside_a_pass_any_use_equals_torch(name: str, settings: dict[str, object]) -> None:
    for loss, weights, bound, live in run_ranks(2, compare, name, settings):
        assert loss < 1e-12 and weights < 1e-12
        assert live <= bound


def kept_loss(settings: dict[str, object]) -> float:
    """How far weights are off plain torch's after backwards from a loss that no forward returned."""
    torch.manual_seed(3)
    model, plain = Keeps().double(), Keeps().double()
    plain.load_state_dict(model.state_dict())
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.ones(2, 8, dtype=torch.float64)
    for _ in range(3):
        for each, its in ((model, optimizer), (plain, plain_optimizer)):
            its.zero_grad()
            each(x)
            each.loss.backward()
            its.step()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.parametrize("settings", [{}, {"reuse": 0, "prefetch": 0}], ids=["default", "bare"])
def test_a_loss_kept_on_the_module(settings: dict[str, object]) -> None:
    """Backward is right, though it begins at nothing that a forward has returned."""
    assert max(run_ranks(2, kept_loss, settings)) < 1e-12


def late(how: str, settings: dict[str, object]) -> tuple[str, float]:
    """Backward reaches a weight long after its release: the right gradient, or an error that one can read."""
    torch.manual_seed(3)
    model = Routed(3).double()
    plain = copy.deepcopy(model)
    settings = {"reuse": 0, "prefetch": 0, **settings}
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config(**settings))
    x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)

    def run(m: nn.Module, step: Callable[[], None], zero_grad: Callable[[], None]) -> None:
        for _ in range(2):
            zero_grad()
            m(x).square().mean().backward()
            step()
        zero_grad()
        if how == "old graph":  # the weights have changed since: plain torch refuses, too
            loss = m(x).square().mean()
            m(x).sum().backward()
            step()
            loss.backward()
        elif how == "twice":  # the same graph again
            loss = m(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            step()
        elif how == "two graphs":  # both forwards first, then both backwards
            one, two = m(x).square().mean(), m(2 * x).sum()
            one.backward()
            two.backward()
            step()
        elif how == "reversed graphs":
            one, two = m(x).square().mean(), m(2 * x).sum()
            two.backward()
            one.backward()
            step()
        elif how == "autograd.grad":
            torch.autograd.grad(m(x).square().mean(), x)
            m(x).square().mean().backward()
            step()
        elif how == "part of it":  # backward from an inner output
            inner = []
            handle = m.blocks[1].register_forward_hook(lambda mod, args, out: inner.append(out))
            m(x)
            handle.remove()
            inner[0].square().mean().backward()
            step()
        elif how == "saved view":  # a tensor made of a weight, used after its pass
            with torch.enable_grad():
                made = []
                handle = m.blocks[0].register_forward_hook(lambda mod, args, out: made.append(mod.lin.weight.sum()))
                out = m(x).square().mean()
                handle.remove()
            (out + made[0]).backward()
            step()

    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    try:
        run(plain, plain_optimizer.step, plain_optimizer.zero_grad)
    except RuntimeError as error:
        refused = str(error)
    else:
        refused = ""
    try:
        run(model, optimizer.step, optimizer.zero_grad)
    except RuntimeError as error:
        return f"{refused and 'torch refuses, too; '}{error}", 0.0
    return "torch refuses" if refused else "", worst(zeropp.full_state(model), plain.state_dict())


WORKS = ["twice", "two graphs", "reversed graphs", "autograd.grad", "part of it", "saved view"]


@pytest.mark.parametrize("settings", [{}, {"reuse": 10**9, "prefetch": 10**6}], ids=["bare", "kept"])
@pytest.mark.parametrize("how", WORKS)
def test_a_late_backward_is_right(how: str, settings: dict[str, object]) -> None:
    for message, off in run_ranks(2, late, how, settings):
        assert message == ""
        assert off < 1e-12


def test_a_backward_through_changed_weights_is_refused() -> None:
    for message, _ in run_ranks(2, late, "old graph", {}):
        assert message.startswith("torch refuses, too; ")
        assert "modified by an inplace operation" in message


def inside_a_block(settings: dict[str, object]) -> str:
    """Backward begins inside a block, which its outputs do not announce: its weights are away, and of no newer step."""
    pair = Pair(Routed(3), make_config(**settings))
    pair.train(chain(3))
    inner: list[Tensor] = []
    handle = pair.model.blocks[1].lin.register_forward_hook(lambda module, args, out: inner.append(out))
    pair.model(pair.batch(pair.rank))
    handle.remove()
    with pytest.raises(RuntimeError) as caught:
        pair.optimizer.backward(inner[0].sum())
    for _ in range(2):
        pair.train(chain(3))
    pair.check()
    return str(caught.value)


@pytest.mark.parametrize("settings", [{"reuse": 0, "prefetch": 0}, {}], ids=["bare", "kept"])
def test_a_backward_that_comes_to_a_weight_that_is_away_is_refused(settings: dict[str, object]) -> None:
    for message in run_ranks(2, inside_a_block, settings):
        assert message.startswith("backward reached a weight") and "modified by an inplace operation" in message


def copied_optimizer() -> list[str]:
    held = managed(0)
    optimizer = held[1]
    uses: dict[str, Use] = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": pickle.dumps}
    return [complaint for name, use in uses.items() if (complaint := attempt(name, lambda u=use: u(optimizer)))]


def test_the_optimizer_is_not_copied() -> None:
    assert run_ranks(1, copied_optimizer, init=False) == [[]]
