"""Arguments that ZeroOptimizer cannot use are refused on every rank within seconds, with a remedy in the error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import zeropp
from tests.support.branching_models import Routed, make_config
from tests.support.rank_pool import run_ranks
from tests.support.refused_arguments import Args, Case, attempt, check, plain, sgd


def only_on(bad: int, rank: int, case: Case, model: nn.Module) -> Args:
    return case(model, rank) if rank == bad else plain(model)


class Lamb(torch.optim.Optimizer):
    """A user's LAMB optimizer, which zeropp refuses by its class name."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad / (p.grad.norm() + 1e-6) * p.data.norm(), alpha=-group["lr"])


class Trusting(torch.optim.Optimizer):
    """LAMB under another class name. Only a trial step can show that it is not elementwise."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})

    step = Lamb.step


class Broken(torch.optim.Optimizer):
    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:
        raise KeyError("momentum")


def distributed(model: nn.Module, rank: int) -> Args:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.extra = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh))
    return plain(model)


def with_meta(model: nn.Module, rank: int) -> Args:
    model.extra = nn.Parameter(torch.empty(4, device="meta"))
    return plain(model)


def with_sparse(model: nn.Module, rank: int) -> Args:
    model.emb = nn.Embedding(5, 4, sparse=True)
    return plain(model)


def with_sparse_parameter(model: nn.Module, rank: int) -> Args:
    model.extra = nn.Parameter(torch.eye(4).to_sparse())
    return plain(model)


def with_inference_parameter(model: nn.Module, rank: int) -> Args:
    with torch.inference_mode():
        model.extra = nn.Parameter(torch.ones(4))
    return plain(model)


def with_max_norm(model: nn.Module, rank: int) -> Args:
    model.emb = nn.Embedding(5, 4, max_norm=1.0)
    return plain(model)


def with_slices(model: nn.Module, rank: int) -> Args:
    whole = torch.randn(2, 8, 8)
    for block, weight in zip(model.blocks, whole, strict=False):
        block.lin.weight = nn.Parameter(weight)
    return plain(model)


def with_meta_buffer(model: nn.Module, rank: int) -> Args:
    model.register_buffer("seen", torch.empty(3, device="meta"))
    return plain(model)


def scaled(scale: Callable[[int], object]) -> Case:
    return lambda m, r: Args(sgd(m), m, make_config(), scale=scale(r))


def with_complex(model: nn.Module, rank: int) -> Args:
    model.extra = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    return plain(model)


def wrapped_twice(model: nn.Module, rank: int) -> Args:
    model.held = zeropp.ZeroOptimizer(sgd(model), model, make_config())  # keeps the first engine alive
    return Args(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), model, make_config())


def wrapped_twice_own(model: nn.Module, rank: int) -> Args:
    optimizer = sgd(model)
    model.held = zeropp.ZeroOptimizer(sgd(model), model, make_config())
    return Args(optimizer, model, make_config())


def wrapped_again(model: nn.Module, rank: int) -> Args:
    zeropp.ZeroOptimizer(sgd(model), model, make_config()).close()
    model.held = None  # tells `attempt` that the classes of parameters had changed before the refused call
    return plain(model)


def zero_of_zero(model: nn.Module, rank: int) -> Args:
    model.held = zeropp.ZeroOptimizer(sgd(model), model, make_config())
    return Args(model.held, model, make_config())


def two_meshes(model: nn.Module, rank: int) -> Args:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "dp"))
    return Args(sgd(model), model, make_config(), mesh)


def zero(model: nn.Module, **settings: object) -> Args:
    return Args(sgd(model), model, {"zero_optimization": {"stage": 3, **settings}})


def by(make: Callable[..., torch.optim.Optimizer]) -> Case:
    return lambda m, r: Args(make(m.parameters()), m, make_config())


def muon(model: nn.Module, rank: int) -> Args:
    return Args(torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]), model, make_config())


# Name -> (case, types of the error, pattern in its message). All ranks pass the same wrong arguments.
EVERYWHERE: dict[str, tuple[Case, str, str]] = {
    "model is a list": (lambda m, r: Args(sgd(m), [m]), "TypeError", "model is a list; expected a torch.nn.Module"),
    "model is None": (lambda m, r: Args(sgd(m), None), "TypeError", "model is a NoneType"),
    "model is a class": (lambda m, r: Args(sgd(m), Routed), "TypeError", "model is a"),
    "optimizer is a class": (lambda m, r: Args(torch.optim.SGD, m), "TypeError", "optimizer is a type; expected"),
    "swapped": (lambda m, r: Args(m, sgd(m)), "TypeError", "optimizer is a Routed; expected a torch.optim.Optimizer"),
    "config is a list": (lambda m, r: Args(sgd(m), m, [3]), "ConfigError|TypeError", "list"),
    "config is a number": (lambda m, r: Args(sgd(m), m, 3), "ConfigError|TypeError", "int"),
    "no such file": (lambda m, r: Args(sgd(m), m, "no/such/file.json"), "ConfigError|OSError", "no/such/file"),
    "unknown key": (lambda m, r: plain(m, gradient_cliping=1.0), "ConfigError", "gradient_clipping"),
    "unknown zero key": (lambda m, r: zero(m, stage3_max_live_parameter=1), "ConfigError", "max_live_parameters"),
    "wrong value": (lambda m, r: plain(m, gradient_clipping="much"), "ConfigError", "gradient_clipping"),
    "stage 4": (lambda m, r: zero(m, stage=4), "ConfigError", "stage: got 4; expected"),
    "replicas of three": (lambda m, r: zero(m, mics_shard_size=3), "ValueError", r"must be one of \[1, 2\]"),
    "main weights in 16 bits": (
        lambda m, r: plain(m, bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
        "ConfigError",
        "bf16_master_weights_and_grads.*not in this version",
    ),
    "offload of one stage": (lambda m, r: zero(m, stage=1, offload_param={"device": "cpu"}), "ConfigError", "stage 3"),
    "group is a string": (lambda m, r: Args(sgd(m), m, make_config(), "dp"), "TypeError", "process_group is a str"),
    "group is a list": (lambda m, r: Args(sgd(m), m, make_config(), [0, 1]), "TypeError", "process_group is a list"),
    "mesh of two dimensions": (two_meshes, "ValueError", r"DeviceMesh of 2 dimensions.*mesh\['dp'\]"),
    "no parameters": (lambda m, r: Args(sgd(m), nn.ReLU()), "ValueError", "no parameters|does not belong"),
    "foreign parameters": (lambda m, r: Args(sgd(Routed()), m), "ValueError", "not belong to the model; make the opt"),
    "wrapped twice": (wrapped_twice, "ValueError", "already managed by a ZeroOptimizer|does not belong"),
    "wrapped twice, old optimizer": (wrapped_twice_own, "ValueError", "managed by a ZeroOptimizer.*del optimizer"),
    "wrapped, closed, wrapped": (wrapped_again, "ValueError", r"given up by close\(\)"),
    "optimizer wrapped twice": (zero_of_zero, "ValueError", "ZeroOptimizer already; give it the plain"),
    "meta parameter": (with_meta, "ValueError", "'extra' is on the meta device.*device=.*materialize"),
    "all on meta": (lambda m, r: plain(nn.Linear(3, 3, device="meta")), "ValueError", "meta device.*materialize"),
    "DTensor": (distributed, "TypeError", "'extra' is a DTensor.*plain"),
    "sparse embedding": (with_sparse, "ValueError", "'emb' makes sparse gradients.*sparse=False"),
    "sparse parameter": (with_sparse_parameter, "ValueError", "'extra' has layout torch.sparse_coo.*dense"),
    "inference parameter": (with_inference_parameter, "ValueError", "'extra' was made in inference mode"),
    "slices": (with_slices, "ValueError", r"'blocks\.0\.lin\.weight' was made from a view.*view\.clone\(\)"),
    "max_norm": (with_max_norm, "ValueError", "'emb' has max_norm 1.0.*without max_norm"),
    "meta buffer": (with_meta_buffer, "ValueError", "buffer 'seen' is on the meta device"),
    "scale is a string": (scaled(lambda r: "x"), "TypeError", "gradient_scale is 'x'; expected a number"),
    "scale is NaN": (scaled(lambda r: float("nan")), "ValueError", "gradient_scale is nan; expected a finite"),
    "scale is infinite": (scaled(lambda r: float("inf")), "ValueError", "gradient_scale is inf; expected a finite"),
    "complex": (with_complex, "ValueError", "'extra' is complex.*view_as_real"),
    "DDP": (lambda m, r: plain(DistributedDataParallel(m)), "TypeError", "DistributedDataParallel.*model.module"),
    "DataParallel": (lambda m, r: plain(nn.DataParallel(m)), "TypeError", "DataParallel.*model.module"),
    "Muon": (muon, "TypeError", "Muon.*not in this version.*AdamW"),
    "Adafactor": (by(torch.optim.Adafactor), "TypeError", "Adafactor.*not in this version.*AdamW"),
    "LBFGS": (by(torch.optim.LBFGS), "TypeError", "LBFGS.*not in this version"),
    "SparseAdam": (by(torch.optim.SparseAdam), "TypeError", "SparseAdam.*sparse"),
    "own LAMB": (by(Lamb), "TypeError", "Lamb.*not in this version"),
    "own LAMB, other name": (by(Trusting), "TypeError", "Trusting.*differs.*not elementwise"),
    "broken optimizer": (by(Broken), "TypeError", "Broken.*momentum"),
}


def with_shape(model: nn.Module, rank: int) -> Args:
    model.blocks[1].lin.weight = nn.Parameter(torch.ones(8, 9 if rank == 1 else 8))
    return plain(model)


def with_dtype(model: nn.Module, rank: int) -> Args:
    if rank == 1:
        model.blocks[1].double()
    return plain(model)


def with_name(model: nn.Module, rank: int) -> Args:
    setattr(model, f"extra{rank}", nn.Parameter(torch.ones(3)))
    return plain(model)


def with_count(model: nn.Module, rank: int) -> Args:
    if rank == 0:
        model.extra = nn.Parameter(torch.ones(3))
    return plain(model)


def with_frozen(model: nn.Module, rank: int) -> Args:
    model.blocks[2].lin.bias.requires_grad_(rank == 0)
    return Args(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model, make_config())


def with_groups(model: nn.Module, rank: int) -> Args:
    """Return an optimizer that lacks the last two parameters on rank 1, which would not update its slices of them."""
    parameters = list(model.parameters())
    return Args(torch.optim.SGD(parameters[: len(parameters) - 2 * rank], lr=0.1), model, make_config())


def with_clipping(model: nn.Module, rank: int) -> Args:
    return plain(model, gradient_clipping=1.0 + rank)


def with_lr(model: nn.Module, rank: int) -> Args:
    return Args(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1 + rank)), model, make_config())


def with_buffer(model: nn.Module, rank: int) -> Args:
    if rank == 1:
        model.register_buffer("seen", torch.zeros(3))
    return plain(model)


def with_buffer_shape(model: nn.Module, rank: int) -> Args:
    model.register_buffer("seen", torch.zeros(3 + rank))
    return plain(model)


def with_tie(model: nn.Module, rank: int) -> Args:
    if rank == 1:
        model.blocks[1].lin.weight = model.blocks[0].lin.weight
    return plain(model)


# Name -> (case, pattern in the message of every rank). Each rank's arguments are right by themselves, but differ.
DIFFERENT: dict[str, tuple[Case, str]] = {
    "shape": (with_shape, r"blocks\.1\.lin\.weight \(8, 8\).*rank 1.*\(8, 9\).*same model"),
    "dtype": (with_dtype, r"blocks\.1\.lin\.weight.*float32.*float64"),
    "name": (with_name, "extra0.*extra1"),
    "count": (with_count, "extra"),
    "frozen": (with_frozen, r"blocks\.2\.lin\.bias.*trainable.*frozen"),
    "optimizer": (with_groups, "(?i)optimizer"),
    "tensor lr": (with_lr, "(?i)optimizer"),
    "configuration": (with_clipping, "configuration"),
    "buffer": (with_buffer, "buffer seen"),
    "shape of a buffer": (with_buffer_shape, r"buffer seen \(3,\).*buffer seen \(4,\)"),
    "gradient_scale": (scaled(lambda r: 1.0 + r), "gradient_scale 1.0.*gradient_scale 2.0"),
    "tied": (with_tie, r"blocks\.1\.lin\.weight"),
}


def bad_on_one(name: str) -> Case:
    case = EVERYWHERE[name][0]
    return lambda m, r: only_on(1, r, case, m)


# Keys of EVERYWHERE whose wrong arguments only rank 1 passes. The other rank must raise an error, too.
ON_ONE = [
    "model is None", "swapped", "unknown key", "stage 4", "group is a string", "no parameters", "foreign parameters",
    "meta parameter", "sparse embedding", "own LAMB", "no such file",
]  # fmt: skip


def try_everywhere(name: str) -> tuple[str, str, float]:
    return attempt(EVERYWHERE[name][0])


def try_different(name: str) -> tuple[str, str, float]:
    return attempt(DIFFERENT[name][0])


def try_on_one(name: str) -> tuple[str, str, float]:
    return attempt(bad_on_one(name))


@pytest.mark.every(6)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_mistake_on_every_rank(name: str) -> None:
    _, kinds, pattern = EVERYWHERE[name]
    check(run_ranks(2, try_everywhere, name, timeout=40), kinds, pattern)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_bring_different_things(name: str) -> None:
    check(run_ranks(2, try_different, name, timeout=40), "ValueError", DIFFERENT[name][1])


@pytest.mark.every(6)
@pytest.mark.parametrize("name", ON_ONE)
def test_a_mistake_on_one_rank(name: str) -> None:
    _, kinds, pattern = EVERYWHERE[name]
    good, bad = run_ranks(2, try_on_one, name, timeout=40)
    check([bad], kinds, pattern)
    check([good], "RuntimeError", rf"failed on rank 1: \w+: .*(?:{pattern})")
