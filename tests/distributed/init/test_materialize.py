"""Models on the meta device are initialized module by module, or loaded. transformers builds in ``zero.Init``."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from tests.support.hf_models import logits, make
from tests.support.peak_memory import Peak
from tests.support.rank_pool import run_ranks, some
from tests.support.zero_init_model import same_as
from zeropp import checkpoint, zero
from zeropp.params import sharded_build
from zeropp.params.guard import is_guarded


class Model(nn.Module):
    """A model with a recurrent layer, a tied weight, persistent and non-persistent buffers, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.recurrent = nn.LSTM(24, 24, batch_first=True)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 40)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(24.0), persistent=False)
        self.count = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(24.0))
            self.count.fill_(7)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.recurrent(self.embedding(tokens) + self.table)[0]
        return self.head(self.norm(out.transpose(1, 2)).transpose(1, 2)) + self.count.sum()


def reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def trained(model: nn.Module) -> tuple[dict[str, Tensor], float]:
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    state = zeropp.full_state(model)
    loss = model(torch.arange(12).view(2, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.close()
    return state, loss.item()


def initialised() -> list[str]:
    """Return differences between a materialized model and a model that is initialized module by module."""
    plain = Model()
    torch.manual_seed(5)
    with torch.no_grad():
        for module in plain.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    state, loss = trained(plain)
    torch.manual_seed(5 + (dist.get_rank() if dist.is_initialized() else 0))
    with torch.device("meta"):
        model = Model()
    before = dict(model.named_parameters())
    with mock.patch.object(sharded_build, "LIMIT_NBYTES", 0), mock.patch.object(sharded_build, "SMALL", 100):
        zero.materialize(model, reset)
    wrong = [] if is_guarded(model.embedding.weight) else ["whole"]
    wrong += [name for name, parameter in model.named_parameters() if parameter is not before[name]]
    own, again = trained(model)
    wrong += [f"loss {loss} {again}"] if loss != again else []
    return wrong + [name for name, value in state.items() if not torch.equal(value, own[name])]


def test_initialised_module_by_module() -> None:
    assert run_ranks(2, initialised) == [[], []]
    assert run_ranks(1, initialised, init=False) == [[]]


def awaits(path: Path) -> tuple[str, str, dict[str, Tensor]]:
    """Use a model before its values are loaded, and load them.

    Args:
        path: folder of a safetensors file.

    Returns:
        The error for a buffer that no file has, the error of an early forward, and full_state after the load.
    """
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError) as missing:
        zero.materialize(model)
    model = Model().to("meta")
    model.table = torch.arange(24.0)
    model.head.weight = model.embedding.weight
    zero.materialize(model)
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    with pytest.raises(RuntimeError) as early:
        model(torch.arange(12).view(2, 6))
    with pytest.raises(RuntimeError, match=r"norm\.running_var"):
        model.norm(torch.zeros(2, 24))
    checkpoint.load_safetensors(model, path)
    state = zeropp.full_state(model)
    model(torch.arange(12).view(2, 6)).sum().backward()
    return str(missing.value), str(early.value), state


@pytest.mark.every(2)
@pytest.mark.parametrize("world", [2, 1])
def test_values_are_awaited(world: int, tmp_path: Path) -> None:
    """A forward before the values are loaded is refused on every rank, with the parameters' names.

    After the load training works.
    """
    torch.manual_seed(3)
    state = {name: value for name, value in Model().state_dict().items() if name != "head.weight"}
    save_file(state, str(tmp_path / "model.safetensors"))
    for missing, early, found in run_ranks(world, awaits, tmp_path):
        assert "Model.table is on the meta device" in missing
        assert "'embedding.weight'" in early and "load_safetensors" in early and "count" not in early
        assert all(torch.equal(value, found[name]) for name, value in state.items())


def forgets(kind: str) -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        for layer in model:
            layer.register_buffer("order", torch.arange(9))

    def initialize(module: nn.Module) -> None:
        if kind == "fails" and dist.get_rank() == 1 and module is model[1]:
            raise ArithmeticError("no more")
        nn.init.zeros_(module.weight)
        if kind == "fails":
            nn.init.zeros_(module.bias)
            module.order.zero_()

    try:
        zero.materialize(model, initialize)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        return str(error)
    return "nothing"


def test_tensors_left_without_values_are_named() -> None:
    assert all("['0.bias', '0.order'] without values" in error for error in run_ranks(2, forgets, "forgets"))
    errors = run_ranks(2, forgets, "fails")
    assert errors[1] == "no more" and "failed on rank 1: ArithmeticError: no more" in errors[0]


def pretrained(kind: str, path: Path) -> list[str]:
    """Return differences from plain transformers of a model that is built, and of one that is loaded, in ``zero.Init``.

    Args:
        kind: key of MODELS.
        path: folder of the saved model.
    """
    plain = make(kind, 1)
    with mock.patch.object(sharded_build, "LIMIT_NBYTES", 0), mock.patch.object(sharded_build, "SMALL", 200):
        with zero.Init():
            model: Any = make(kind, 1 + dist.get_rank())
        with zero.GatheredParameters(model.parameters()):
            wrong = [f"built {name}" for name in same_as(model, plain)]
        with zero.Init():
            model = type(plain).from_pretrained(path).eval()
    wrong += [] if any(map(is_guarded, model.parameters())) else ["whole"]
    with zero.GatheredParameters(model.parameters()):
        wrong += [f"loaded {name}" for name in same_as(model, plain)]
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    return wrong + ([] if torch.equal(logits(model), logits(plain)) else ["logits"])


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", ["tied", "t5", "mixtral"])
def test_transformers(kind: str, tmp_path: Path) -> None:
    make(kind, 1).save_pretrained(tmp_path)
    assert run_ranks(2, pretrained, kind, tmp_path) == [[], []]


def recipe(path: Path) -> bool:
    """Load a transformers model as docs/multinode.md shows, so that each rank reads its part.

    Returns:
        True if the logits equal plain transformers'.
    """
    plain = make("llama", 1)
    with torch.device("meta"):
        model = make("llama", 2)
    zero.materialize(model, buffers=model._init_weights)
    zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, make_config())
    checkpoint.load_safetensors(model, path)
    return torch.equal(logits(model), logits(plain))


def test_a_model_of_transformers_on_the_meta_device(tmp_path: Path) -> None:
    make("llama", 1).save_pretrained(tmp_path)
    assert run_ranks(2, recipe, tmp_path) == [True, True]


class Large(nn.Module):
    """A list of ``count`` float32 layers of ``width`` x ``width``."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(count)])


def peak(count: int, width: int, way: str, path: Path, limit: int) -> tuple[int, int, int, int]:
    """Measure memory while a model is built and gets its values.

    Args:
        count: number of layers.
        width: width of a layer.
        way: "Init" (zero.Init) or "load" (materialize and load_safetensors).
        path: folder of the weights to load.
        limit: bytes of waiting parameters after which they are cut.

    Returns:
        Peak bytes beyond those before while the model is built, and until it has its values; bytes that the engine
        owns; and bytes read.
    """
    nbytes_read = 0
    with Peak() as whole:
        with Peak() as building, mock.patch.object(sharded_build, "LIMIT_NBYTES", limit):
            if way == "Init":
                with zero.Init():
                    model = Large(count, width)
            else:
                with torch.device("meta"):
                    model = Large(count, width)
                zero.materialize(model)
        config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, config)
        if way == "load":
            nbytes_read = checkpoint.load_safetensors(model, path).nbytes_read
    owned = sum(nbytes for unit in optimizer.engine.units for _, nbytes in unit.owned_bytes())
    return building.nbytes, whole.nbytes, owned, nbytes_read


def write(path: Path, count: int, width: int) -> None:
    for number in range(count):
        name = f"layers.{number}.weight"
        save_file({name: torch.full((width, width), 0.01 * number)}, str(path / f"{number}.safetensors"))


SIZES = [
    (44, 1024, 1 << 23, 60),
    pytest.param(60, 4096, sharded_build.LIMIT_NBYTES, 300, marks=[pytest.mark.campaign, pytest.mark.timeout(900)]),
]


@pytest.mark.parametrize("way", some(["Init", "load"], 2))
@pytest.mark.parametrize(("count", "width", "limit", "megabytes"), SIZES)
def test_memory(way: str, count: int, width: int, limit: int, megabytes: int, tmp_path: Path) -> None:
    """Memory is bounded by a rank's share, two of the largest unit, and a few megabytes.

    The models have 46 million and 1 billion parameters. While the model is built, the share is that of the float32
    weights; afterwards it is the memory that the engine owns, with gradients. The bytes read are those of the share.
    """
    if way == "load":
        write(tmp_path, count, width)
    unit = 4 * width * width
    share, more = count * unit // 2, 2 * unit + megabytes * 1_000_000
    for building, whole, owned, nbytes_read in run_ranks(2, peak, count, width, way, tmp_path, limit, timeout=600):
        assert owned <= 2.02 * share  # weights and their gradients
        assert building <= (share if way == "Init" else 0) + more, (building, share)
        assert whole <= owned + more, (whole, owned)
        assert way == "Init" or share <= nbytes_read <= 1.02 * share
