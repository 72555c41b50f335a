"""A resharded model: metadata of its parameters is true, and moving, copying or pickling the model is refused."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks
from tests.support.resharded_model import PERSIST, Held, Use, attempt, held, still_trains


class Special(nn.Parameter):
    """A parameter class of a user."""

    note = "kept"


ATTRIBUTES = (
    "names", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "is_ipu", "is_vulkan", "is_maia", "is_mtia",
    "retains_grad", "output_nr", "name", "_backward_hooks",
)  # fmt: skip
QUESTIONS = ("is_signed", "is_shared", "is_pinned", "is_inference", "has_names", "is_conj", "is_neg", "is_distributed")


def described(p: nn.Parameter) -> dict[str, object]:
    """Return, by name, everything about a parameter that can be read without its values."""
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
        "alike": [
            (each.shape, each.stride(), each.dtype, each.device) for each in (torch.empty_like(p), torch.rand_like(p))
        ],
        "filled alike": [
            torch.full_like(p, 2, dtype=torch.int8).sum(),
            torch.zeros_like(p).sum(),
            torch.ones_like(p).sum(),
        ],
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


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", PERSIST)
def test_metadata_is_true_while_partitioned(kind: str) -> None:
    for wrong in run_ranks(2, metadata, PERSIST[kind]):
        assert not wrong, "\n".join(wrong)


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
    pair = held(persist)
    wrong = []
    if dist.get_rank() in who:
        for name, use in MODEL_USES.items():
            complaint = attempt(name, lambda u=use: u(pair.model))
            wrong += [complaint] if complaint else []
    flags = {name: p.requires_grad for name, p in pair.model.named_parameters() if not p.requires_grad}
    wrong += [f"{name} is frozen now" for name in flags]
    return wrong, still_trains(pair)


@pytest.mark.every(5)
@pytest.mark.parametrize("who", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize("kind", PERSIST)
def test_moving_copying_and_pickling_the_model_are_refused(kind: str, who: list[int]) -> None:
    for rank, (wrong, off) in enumerate(run_ranks(2, touch_model, PERSIST[kind], who)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
        assert off < 1e-6


class Peeking(nn.Linear):
    """A layer that reads its present weight while a state dict is loaded."""

    def _load_from_state_dict(self, *args: object) -> None:
        torch.zeros(self.weight.shape).copy_(self.weight)
        super()._load_from_state_dict(*args)


def peek() -> float:
    model = Held()
    model.last = Peeking(8, 3)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    before = zeropp.full_state(model)
    with pytest.raises(RuntimeError, match=r"copy_ on parameter 'last\.weight': zeropp keeps its values elsewhere"):
        model.load_state_dict(before)
    off = worst(zeropp.full_state(model), before)
    optimizer.close()
    return off


def test_values_are_refused_while_others_are_loaded() -> None:
    assert run_ranks(2, peek) == [0.0, 0.0]


def copied_optimizer() -> list[str]:
    pair = held(0)
    uses: dict[str, Use] = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": pickle.dumps}
    return [complaint for name, use in uses.items() if (complaint := attempt(name, lambda u=use: u(pair.optimizer)))]


def test_the_optimizer_is_not_copied() -> None:
    assert run_ranks(1, copied_optimizer, init=False) == [[]]
