"""Values other than weights are restored exactly: empty tensors, states of other dtypes, and tensors in settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.checkpoint_training import CONFIGS, wrap
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint.metadata import Metadata


class Told(nn.Linear):
    """A layer whose extra state has an empty tensor."""

    def get_extra_state(self) -> Any:
        return {"empty": torch.empty(0, 3)}

    def set_extra_state(self, state: Any) -> None:
        self.told = state


class Odd(torch.optim.Optimizer):
    """An optimizer with states of other dtypes than the parameter's, and with states that are no tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["count"] = torch.full_like(p, 2**24 + 1, dtype=torch.int64)
                    state["mask"] = torch.ones_like(p, dtype=torch.bool)
                    state["word"], state["number"] = "words", torch.tensor(2**24 + 1)
                    state["single"] = torch.tensor([2**24 + 1])
                state["m"].mul_(0.9).add_(p.grad.bfloat16(), alpha=0.1)
                state["count"] += 1
                state["single"] += 1
                p.add_(state["m"].float() + (state["count"] % 2).float() * 0.01, alpha=-group["lr"])


Pair = tuple[nn.Module, zeropp.ZeroOptimizer]


def built(make: Callable[[Any], torch.optim.Optimizer], steps: int = 1) -> Pair:
    model = nn.Sequential(Told(6, 20), nn.Linear(20, 3))
    optimizer = zeropp.ZeroOptimizer(make(model), model, CONFIGS["stage 3"])
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **how)


def test_values_without_elements(tmp_path: Path) -> None:
    given = {"t": torch.empty(0), "deep": [torch.empty(2, 0, dtype=torch.bfloat16)]}
    model, optimizer = built(adamw)
    for asynchronous in (False, True):
        checkpoint.save(tmp_path / "here", model, optimizer, given, asynchronous=asynchronous)
        checkpoint.wait()
        found = checkpoint.load(tmp_path / "here", model, optimizer).extra
        assert found["t"].shape == (0,) and found["deep"][0].shape == (2, 0)
        assert found["deep"][0].dtype == torch.bfloat16 and model[0].told["empty"].shape == (0, 3)  # type: ignore[index]


def test_values_that_could_not_be_loaded_are_not_saved(tmp_path: Path) -> None:
    model, optimizer = built(adamw)
    checkpoint.save(tmp_path / "here", model, optimizer)
    good = Metadata.read(tmp_path / "here")
    lacking = good.model_copy(update={"values": {**good.values, "extra": {"t": {"~tensor": "extra.t"}}}})
    with pytest.raises(checkpoint.CheckpointError, match=r"'extra\.t'\] were not written"):
        lacking.write(tmp_path / "here")
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value in ("\udcff", deep):
        with pytest.raises(checkpoint.CheckpointError, match="could not be read again"):
            good.model_copy(update={"values": {"x": value}}).write(tmp_path / "here")
    checkpoint.load(tmp_path / "here", model, optimizer)


def test_a_dtype_that_files_have_not_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = built(adamw)
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(checkpoint.CheckpointError, match=r"'model\.turns' is of torch\.complex128"):
        checkpoint.save(tmp_path / "here", model, optimizer, asynchronous=True)


def test_sums_of_another_width_and_values_that_are_missing(tmp_path: Path) -> None:
    """Wrong checksums and missing tensors are found before anything changes."""
    model, optimizer = built(adamw)
    checkpoint.save(tmp_path / "here", model, optimizer)
    good = Metadata.read(tmp_path / "here")
    (file,) = good.files
    cut = good.model_copy(update={"files": (file.model_copy(update={"sums": "AAAA"}),)})
    cut.write(tmp_path / "here")
    with pytest.raises(checkpoint.CheckpointError, match=r"the checksums of .* are damaged"):
        checkpoint.load(tmp_path / "here", model, optimizer)
    lacking = good.model_copy(update={"values": {**good.values, "extra": {"t": {"~tensor": "extra.t"}}}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metadata, "_check_loads", lambda *_: None)
        lacking.write(tmp_path / "here")
    with pytest.raises(checkpoint.CheckpointError, match=r"has no tensor 'extra\.t'.*nothing was changed"):
        checkpoint.load(tmp_path / "here", model, optimizer)
    checkpoint.load(tmp_path / "here", model, optimizer, only=["model"])


def test_states_keep_dtypes_of_their_own(tmp_path: Path) -> None:
    model, optimizer = built(lambda model: Odd(model.parameters()), 2)
    checkpoint.save(tmp_path / "here", model, optimizer)
    other, loaded = built(lambda model: Odd(model.parameters()))
    checkpoint.load(tmp_path / "here", other, loaded)
    for one, two in zip(optimizer.slices.all, loaded.slices.all, strict=True):
        left, right = optimizer.inner.state[one.parameter], loaded.inner.state[two.parameter]
        assert left.keys() == right.keys() and right["word"] == "words"
        for key in ("m", "count", "mask", "number", "single"):
            assert right[key].dtype == left[key].dtype and torch.equal(right[key], left[key]), key
    numbers = [loaded.inner.state[part.parameter]["single"] for part in loaded.slices.all]
    # Each parameter has its own tensor, because optimizers increment step counts in place.
    assert len({number.data_ptr() for number in numbers}) == len(numbers)
    optimizer.inner.state[optimizer.slices.all[0].parameter]["pair"] = torch.zeros(2)
    with pytest.raises(checkpoint.CheckpointError, match="expected one element for each of the parameter's"):
        checkpoint.save(tmp_path / "pair", model, optimizer)


def test_groups_with_equal_tensors_become_one(tmp_path: Path) -> None:
    """Two saved groups load into one if their settings, tensors included, are equal. Otherwise the load is refused."""

    def two(second: float) -> Callable[[Any], torch.optim.Optimizer]:
        return lambda model: torch.optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": torch.tensor(0.5)},
                {"params": model[1].parameters(), "lr": torch.tensor(second)},
            ]
        )

    for second in (0.5, 0.25):
        checkpoint.save(tmp_path / str(second), *built(two(second)))
    model, optimizer = built(lambda model: adamw(model, lr=torch.tensor(0.1)))
    checkpoint.load(tmp_path / "0.5", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(checkpoint.CheckpointError, match="with different settings"):
        checkpoint.load(tmp_path / "0.25", model, optimizer)


def test_another_optimizer_is_refused_and_other_switches_told(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "here", *built(adamw))
    model, optimizer = built(lambda model: torch.optim.Adagrad(model.parameters()))
    with pytest.raises(checkpoint.CheckpointError, match=r"states of AdamW, and the optimizer is Adagrad.*nothing was"):
        checkpoint.load(tmp_path / "here", model, optimizer)
    with pytest.warns(UserWarning, match="states of AdamW, and the optimizer is Adagrad"):
        checkpoint.load(tmp_path / "here", model, optimizer, strict=False)
    with pytest.warns(UserWarning, match="'amsgrad' of group 0 is True here; the checkpoint's False"):
        checkpoint.load(tmp_path / "here", *built(lambda model: adamw(model, amsgrad=True)))


def without_xxhash_on_one(path: Path) -> tuple[str, str, int]:
    from torch.distributed.tensor import Shard, distribute_tensor

    model, optimizer = wrap("stage 3")
    extra = {"empty": torch.empty(dist.get_rank() and 0, 2), "own": dist.get_rank()}
    real = importlib.import_module

    def without(module: str, *rest: Any) -> Any:
        if module == "xxhash":
            raise ImportError(module)
        return real(module, *rest)

    try:
        if dist.get_rank() == 1:
            importlib.import_module = without  # type: ignore[assignment]
        checkpoint.save(path, model, optimizer, extra)
        found = checkpoint.load(path, model, optimizer).extra
    finally:
        importlib.import_module = real
    spread = distribute_tensor(torch.ones(4), dist.device_mesh.init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        checkpoint.save(path, model, optimizer, {"deep": [spread]})
        told = ""
    except checkpoint.CheckpointError as error:
        told = str(error)
    assert found["empty"].shape == (0, 2)
    return Metadata.read(path).algorithm, told, found["own"]


def test_checksums_that_all_ranks_have_and_tensors_that_are_spread(tmp_path: Path) -> None:
    for rank, (algorithm, told, own) in enumerate(run_ranks(2, without_xxhash_on_one, tmp_path / "here")):
        assert algorithm == "crc32" and own == rank and "extra.deep.0 is a tensor of class" in told
