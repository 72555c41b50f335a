"""``zero.Init``: a model built in pieces has the values of a plain build, and no rank ever has the whole model."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import zeropp
from tests.support.branching_models import make_config, worst
from tests.support.rank_pool import run_ranks
from tests.support.zero_init_model import Odd, limits, same_as, seeded
from zeropp import zero
from zeropp.comm.collective import BuildComm
from zeropp.params import sharded_build
from zeropp.params.guard import is_guarded


def hooks() -> int:
    """Return the number of torch's global module hooks, plus one for each patched method.

    It is 0 outside of ``zero.Init``.
    """
    tables = (torch_modules._global_parameter_registration_hooks, torch_modules._global_module_registration_hooks)
    return sum(map(len, tables)) + (nn.Module.apply is not APPLY) + (vars(nn.Parameter)["__new__"] is not NEW)


APPLY, NEW = nn.Module.apply, vars(nn.Parameter)["__new__"]


def odd(nbytes: int, small: int, config: dict[str, Any] | None) -> tuple[list[str], int, list[float]]:
    """Build a model in ``zero.Init``, wrap it, and train it.

    Args:
        nbytes: bytes of waiting parameters after which they are cut.
        small: number of elements up to which a parameter stays whole.
        config: configuration; None for the default.

    Returns:
        Differences from a plain build (and hooks that are left), number of sharded parameters, and differences of
        three losses.
    """
    plain = seeded(Odd)
    with limits(nbytes, small), zero.Init(config_dict_or_path=config):
        # Each rank has its own random numbers, and rank 0's values are broadcast.
        model = seeded(Odd, 3 + dist.get_rank())
    found = ["hooks are left"] if hooks() else []
    pieces = sum(map(is_guarded, model.parameters()))
    with zero.GatheredParameters(model.parameters()):
        found += same_as(model, plain)
    found += [name for name, b in plain.named_buffers() if dist.get_rank() == 0 and not torch.equal(b, model.drift)]
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model, config)
    state = zeropp.full_state(model)
    found += [f"wrapped {name}" for name, value in plain.state_dict().items() if not torch.equal(state[name], value)]
    other = torch.optim.SGD(plain.parameters(), lr=1e-4)
    losses = []
    for step in range(3):
        tokens = (torch.arange(32).view(2, 16) + step) % 60
        own, wanted = model(tokens).mean(), plain(tokens).mean()
        losses.append((own - wanted).abs().item())
        optimizer.backward(own)
        wanted.backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    optimizer.close()
    return found, pieces, losses


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("world", "nbytes", "small", "stage", "apply"),
    [
        pytest.param(2, 1 << 27, 1 << 16, 3, True, marks=pytest.mark.fast),
        (2, 1 << 13, 100, 3, True),
        (1, 1 << 13, 100, 3, True),
        (3, 0, 0, 3, False),
        (4, 1 << 14, 1000, 1, True),
    ],
)
def test_as_a_plain_build(world: int, nbytes: int, small: int, stage: int, apply: bool) -> None:
    """Values equal those of a plain build bit for bit, for any limit on waiting parameters. Losses agree to 1e-3."""
    config = {"zero_optimization": {"stage": stage, "override_module_apply": apply}}
    rows = run_ranks(world, odd, nbytes, small, config)
    for found, pieces, losses in rows:
        assert found == []
        assert (pieces > 10) == (small < 1 << 16)
        # Sums over ranks have another order than in one process.
        assert max(losses) < 1e-3, losses


@pytest.mark.every(2)
@pytest.mark.parametrize("world", [2, 1])
def test_pieces_in_files(world: int, tmp_path: Path) -> None:
    """Pieces may be in files, also on a single rank. No files are left after the optimizer is closed."""
    block = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    config = {"zero_optimization": {"stage": 3, "offload_param": block}, "aio": {"block_size": 1024}}
    for found, pieces, losses in run_ranks(world, odd, 1 << 13, 100, config):
        assert found == [] and pieces > 10 and max(losses) < 1e-3, (found, pieces, losses)
    run_ranks(world, gc.collect)
    assert not list(tmp_path.iterdir())


def collectives(apply: bool) -> tuple[list[tuple[str, int]], list[str]]:
    """Build a model of 200 small layers and a large one.

    Args:
        apply: value of ``override_module_apply``.

    Returns:
        (name, elements) of each collective while building, and descriptions of the exchanges.
    """
    sent: list[tuple[str, int]] = []
    exchanged: list[str] = []
    plain = {name: getattr(BuildComm, name) for name in ("scatter", "broadcast", "all_gather", "exchange")}

    def count(name: str) -> Callable[..., Any]:
        def run(carrier: BuildComm, own: Any, *args: Any) -> Any:
            if name == "exchange":
                exchanged.append(args[-1])
            else:
                sent.append((name, own.numel()))
            return plain[name](carrier, own, *args)

        return run

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(200)])
            self.large = nn.Linear(600, 700)
            self.large.apply(self.reset)

        def reset(self, module: nn.Module) -> None:
            nn.init.zeros_(module.weight)

    with mock.patch.multiple(BuildComm, **{name: count(name) for name in plain}):
        config = {"zero_optimization": {"stage": 3, "override_module_apply": apply}}
        with limits(1 << 20, 1 << 11), zero.Init(config_dict_or_path=config):
            Many()
    return sent, exchanged


def test_collectives_are_bounded() -> None:
    """200 small weights are sent in a few messages of about the limit, and all biases in one message at the end."""
    (sent, exchanged), other = run_ranks(2, collectives, True)
    assert (sent, exchanged) == other
    scatters = [nbytes for name, nbytes in sent if name == "scatter"]
    # The 200 weights of 16 KiB are cut in groups of just over 1 MiB. The large weight is cut once, and once more after
    # ``apply``.
    assert len(scatters) <= 7 and sum(scatters) <= 200 * 8192 + 2 * 4 * 350 * 602, scatters
    assert [name for name, _ in sent].count("broadcast") == 1
    assert [name for name, _ in sent].count("all_gather") == 1
    assert len(exchanged) <= 2 * len(sent) + 2


def test_override_module_apply() -> None:
    """With override_module_apply the function of ``apply`` gets weight and bias together.

    Without it only the parameter that the function uses is gathered.
    """
    together, alone = (run_ranks(2, fetched, apply)[0] for apply in (True, False))
    assert together == 2 and alone == 1


def fetched(apply: bool) -> int:
    """Return the number of parameters that are gathered when a function of ``apply`` initializes one weight.

    Args:
        apply: value of ``override_module_apply``.
    """
    count = 0
    plain = sharded_build.ShardedBuild.gather

    def gather(own: sharded_build.ShardedBuild, parameters: list[nn.Parameter], **options: bool) -> None:
        nonlocal count
        count += len(parameters)
        plain(own, parameters, **options)

    config = {"zero_optimization": {"stage": 3, "override_module_apply": apply}}
    with limits(0, 0), zero.Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Linear(30, 30))
        with mock.patch.object(sharded_build.ShardedBuild, "gather", gather):
            model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    return count


def stayed_whole() -> int:
    """Return the number of weights that are still whole after they were initialized."""
    before = sys.getswitchinterval()
    # With this long interval, threads of the backend run Python only while this thread waits, so they release their
    # tensors late.
    sys.setswitchinterval(100)
    try:
        with limits(0, 0), zero.Init():
            return sum(not is_guarded(nn.Linear(40, 40).weight) for _ in range(10))
    finally:
        sys.setswitchinterval(before)


def test_initialized_weights_are_cut_even_if_backend_threads_are_slow() -> None:
    assert run_ranks(2, stayed_whole) == [0, 0]


def blocks() -> list[str]:
    """Return errors of nested and disabled blocks, of an exception inside, and of the arguments of ``zero.Init``."""
    wrong = []
    with limits(0, 0):
        with zero.Init(), zero.Init():
            model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        wrong += [] if all(map(is_guarded, model.parameters())) else ["nested"]
        with zero.Init(enabled=False):
            model = nn.Linear(40, 40)
        wrong += ["enabled=False"] if any(map(is_guarded, model.parameters())) else []
        torch.manual_seed(dist.get_rank())
        model, plain = nn.Linear(40, 40), seeded(lambda: nn.Linear(40, 40), 0)
        zero.Init(model)
        wrong += [] if all(map(is_guarded, model.parameters())) else ["module="]
        with zero.GatheredParameters(model):
            wrong += [f"module={name}" for name in same_as(model, plain)]
        with pytest.raises(ZeroDivisionError), zero.Init(dtype=torch.bfloat16):
            nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
            1 / 0  # noqa: B018
        wrong += ["an error"] if hooks() or torch.get_default_dtype() != torch.float32 else []
        with zero.Init(dtype=torch.bfloat16, remote_device="cpu", mem_efficient_linear=False):
            model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40, dtype=torch.float32))
        wrong += [] if [p.dtype.itemsize for p in model.parameters()] == [2, 2, 4, 4] else ["dtype"]
        group = dist.new_group([0])
        if dist.get_rank() == 0:
            with zero.Init(data_parallel_group=group):
                model = nn.Linear(40, 40)
            # A group of one rank shards, too, so that code which runs on one rank runs on many.
            wrong += [] if all(map(is_guarded, model.parameters())) else ["alone"]
    return wrong + (["hooks are left"] if hooks() else [])


def test_blocks() -> None:
    assert run_ranks(2, blocks) == [[], []]


def wrapped_inside(small: int) -> tuple[float, list[bool]]:
    """Wrap one model inside the ``zero.Init`` block and one after it.

    Args:
        small: number of elements up to which a parameter stays whole.

    Returns:
        Largest difference of weights from plain training; True for each parameter of the second model that is whole
        before, inside, and after GatheredParameters.
    """
    config, models = {"zero_optimization": {"stage": 3}}, []
    plain = [seeded(lambda: nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)), n) for n in range(2)]

    def wrap(model: nn.Module) -> None:
        models.append((model, zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)))

    with limits(1 << 30, small), zero.Init(config_dict_or_path=config):
        first = seeded(lambda: nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)), 0)
        with zero.Init(config_dict_or_path=config):
            second = seeded(lambda: nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)), 1)
        wrap(first)
        # A wrapped model may become part of another module, and can be trained inside the block.
        nn.ModuleList([first])
        train_beside(*models[0], plain[0])
    whole = [not is_guarded(parameter) for parameter in second.parameters()]
    with zero.GatheredParameters(second.parameters()):
        whole += [not is_guarded(parameter) for parameter in second.parameters()]
    whole += [not is_guarded(parameter) for parameter in second.parameters()]
    wrap(second)
    train_beside(*models[1], plain[1])
    far = [
        worst(zeropp.full_state(model), dict(twin.state_dict())) for (model, _), twin in zip(models, plain, strict=True)
    ]
    return max(far), whole


def train_beside(model: nn.Module, optimizer: zeropp.ZeroOptimizer, plain: nn.Module) -> None:
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        x = torch.full((3, 40), 0.1 * step + 0.2)
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        other.zero_grad()
        plain(x).square().mean().backward()
        other.step()


@pytest.mark.every(5)
@pytest.mark.parametrize(("world", "small"), [(2, 0), (1, 0), (1, 1 << 16)])
def test_a_model_may_be_wrapped_inside_the_block(world: int, small: int) -> None:
    """Both ranks have the same batch, so training equals that of one rank.

    float32 sums in another order differ by up to 1e-6.
    """
    for far, whole in run_ranks(world, wrapped_inside, small):
        assert far < 1e-6
        assert whole == [small > 0] * 4 + [True] * 4 + [small > 0] * 4


def lent() -> list[str]:
    """Read, edit and copy values before wrapping, and make calls that need an engine.

    Returns:
        Errors of values. Calls that must be refused are checked inside.
    """
    wrong: list[str] = []
    with limits(0, 200):
        with zero.Init():
            model = seeded(lambda: nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40)), dist.get_rank())
            with zero.GatheredParameters(model[0].weight, modifier_rank=1), torch.no_grad():
                model[0].weight.fill_(1.0 + dist.get_rank())
        weight, bias = model[2].weight, model[2].bias
        with zero.GatheredParameters([weight, bias], modifier_rank=1), torch.no_grad():
            wrong += ["own class"] if is_guarded(weight) else []
            weight.fill_(dist.get_rank() + 5.0)
            bias.data = torch.full((40,), dist.get_rank() + 7.0, dtype=torch.float64)
        with zero.GatheredParameters(model.parameters()):
            values = [p.detach().clone() for p in model.parameters()]
        wanted = [2.0, None, 6.0, 8.0]
        wrong += [f"value {i}" for i, (v, w) in enumerate(zip(values, wanted, strict=True)) if w and not v.eq(w).all()]
    for doing, match in (
        (lambda: model(torch.ones(2, 40)), "ZeroOptimizer"),
        (lambda: weight.sum(), "GatheredParameters"),
        (lambda: weight.data, "GatheredParameters"),
        (lambda: copy.deepcopy(model), "GatheredParameters"),
        (lambda: model.state_dict(), "ZeroOptimizer"),
        (lambda: edit(weight), "edits made inside GatheredParameters on ranks"),
    ):
        with pytest.raises(RuntimeError, match=match):
            doing()
    zero.register_external_parameter(model[0], bias)
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, make_config())
    state = zeropp.full_state(model)
    wrong += [n for (n, value), v in zip(state.items(), values, strict=True) if not torch.equal(value, v)]
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    optimizer.close()
    return wrong


def edit(weight: nn.Parameter) -> None:
    with zero.GatheredParameters(weight), torch.no_grad():
        weight.add_(1.0 + dist.get_rank())


def test_before_wrapping() -> None:
    assert run_ranks(2, lent) == [[], []]


def mics() -> list[str]:
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    with limits(0, 0), zero.MiCS_Init(config_dict_or_path=config):
        model = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), dist.get_rank())
    plain = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), 0)
    wrong = [] if all(map(is_guarded, model.parameters())) else ["whole"]
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    state = zeropp.full_state(model)
    optimizer.close()
    return wrong + [n for n, value in plain.state_dict().items() if not torch.equal(state[n], value)]


def test_mics() -> None:
    assert run_ranks(4, mics, local_world_size=2) == [[]] * 4


def while_built() -> list[str]:
    """Gather parameters inside the block while the model is still being built.

    Other ranks' edits must be discarded, gathered parameters must not be cut, and a second gather must be refused.

    Returns:
        Errors of values.
    """
    wrong = []
    with limits(0, 0), zero.Init():
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        first, second = model[0].weight, model[1].weight
        with zero.GatheredParameters([first, second], modifier_rank=1), torch.no_grad():
            first.fill_(10.0 + dist.get_rank())
            second.fill_(20.0 + dist.get_rank())
            model.apply(lambda module: None)
            model.append(nn.Linear(30, 30))
            with pytest.raises(RuntimeError, match="gathered already"), zero.GatheredParameters(first):
                pass
        model.append(nn.Linear(30, 30))
        # Some modules are made from another module's weight.
        copied = nn.Parameter(second)
        wrong += [] if type(copied) is nn.Parameter and copied.eq(21.0).all() else ["nn.Parameter"]
    with zero.GatheredParameters(model.parameters()):
        wrong += [] if first.eq(11.0).all() and second.eq(21.0).all() else [f"{first[0, 0]} {second[0, 0]}"]
    return wrong


def test_values_lent_while_building() -> None:
    assert run_ranks(2, while_built) == [[], []]


def normed() -> list[str]:
    """Return differences of torch's parametrizations from a plain build.

    Parametrizations make new parameters from parameters that may already be sharded.
    """

    def build() -> nn.Module:
        layers = [nn.utils.parametrizations.weight_norm(nn.Linear(30, 30)) for _ in range(2)]
        return nn.Sequential(*layers, nn.utils.parametrizations.orthogonal(nn.Linear(30, 30)))

    plain = seeded(build)
    with limits(0, 0), zero.Init():
        model = seeded(build)
    with zero.GatheredParameters(model.parameters()):
        return same_as(model, plain)


def test_parametrizations() -> None:
    assert run_ranks(2, normed) == [[], []]


def gathered() -> tuple[int, int]:
    """Return the number of all-gathers of GatheredParameters, and of wrapping, for 96 sharded parameters."""
    with limits(1 << 14, 0), zero.Init():
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(48)))
    calls: list[int] = []
    plain = BuildComm.all_gather

    def count(own: BuildComm, out: Tensor, *args: Any) -> None:
        calls.append(out.numel())
        plain(own, out, *args)

    with mock.patch.object(BuildComm, "all_gather", count):
        with zero.GatheredParameters(model):
            pass
        lent = len(calls)
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    return lent, len(calls) - lent


def test_gathers_are_joint() -> None:
    for lent, wrapped in run_ranks(2, gathered):
        assert lent == 1 and wrapped <= 2


def unkept() -> list[str]:
    """Return errors of edits inside GatheredParameters.

    Different edits are discarded, equal edits of all ranks are kept.

    A module of many parameters must be cut while it is being built.
    """
    wrong = []
    with limits(1 << 12, 100), zero.Init():
        model = nn.Linear(30, 3)
        many = nn.ParameterList(torch.ones(40, 40) for _ in range(20))
        wrong += [] if is_guarded(many[0]) else ["a module of many parameters is whole"]
    before = model.bias.detach().clone()
    with pytest.raises(RuntimeError, match="are lost"), zero.GatheredParameters(model), torch.no_grad():
        model.bias.add_(1.0 + dist.get_rank())
    wrong += [] if torch.equal(model.bias, before) else ["a lost edit stays"]
    with pytest.raises(RuntimeError, match="are lost"), zero.GatheredParameters(model, modifier_rank=0):
        model.bias.data = torch.zeros(7)
    wrong += [] if torch.equal(model.bias, before) else ["a refused edit of another shape stays"]
    with zero.GatheredParameters([model.bias, many[0]]), torch.no_grad():
        model.bias.add_(1.0)
        many[0].mul_(3.0)
    with zero.GatheredParameters([model.bias, many[0]]):
        kept = torch.equal(model.bias, before + 1) and bool((many[0] == 3).all())
    return wrong + ([] if kept else ["an edit that all ranks have made is lost"])


def test_edits_that_are_not_kept() -> None:
    assert run_ranks(2, unkept) == [[], []]
