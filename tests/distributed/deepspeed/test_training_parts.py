"""Other parts of a training engine: data loaders, inference without an optimizer, compilation and generation."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

import zeropp
from tests.support.branching_models import apart, worst
from tests.support.deepspeed_engine import batch, model_of, settings, train
from tests.support.rank_pool import run_ranks, spread
from zeropp.training import RepeatingLoader


def joined(lists: list[list[float]]) -> list[float]:
    return [value for each in lists for value in each]


def loaded(drop_last: bool) -> tuple[list[list[float]], int, list[float]]:
    data = TensorDataset(torch.arange(20.0))
    config = settings(dataloader_drop_last=drop_last)
    engine, _, loader, _ = zeropp.initialize(model=model_of(), training_data=data, config=config)
    assert loader is engine.training_dataloader
    seen = [each[0].tolist() for each in loader]
    repeating = iter(RepeatingLoader(loader))
    several = [next(repeating)[0].tolist() for _ in range(2 * len(loader))]
    # The second epoch gives this rank other samples.
    assert several[: len(loader)] == seen != several[len(loader) :]
    evaluated = [each[0].tolist() for each in engine.deepspeed_io(data, batch_size=5, route="eval")]
    return seen, len(loader), joined(evaluated)


@pytest.mark.parametrize("drop_last", [False, True])
def test_data_are_dealt_out(drop_last: bool) -> None:
    (first, count, evaluated), (second, _, others) = run_ranks(2, loaded, drop_last)
    assert count == (3 if drop_last else 4) and all(len(each) == 3 for each in first[:3])
    together = joined(first + second)
    assert len(set(together)) == len(together) == (18 if drop_last else 20)
    assert sorted(evaluated) == evaluated and sorted(evaluated + others) == list(range(20))


def test_an_empty_loader_does_not_repeat_for_ever() -> None:
    with pytest.raises(RuntimeError, match="the loader yields no batch"):
        next(RepeatingLoader([]))


class Counted(Sampler[int]):
    """A sampler with one sample, the number of the epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield self.epoch

    def __len__(self) -> int:
        return 1


def test_epochs_go_on_from_where_a_sampler_is() -> None:
    """RepeatingLoader continues from the epoch that a resumed run has set.

    The sampler may be inside a batch sampler.
    """
    data, sampler = TensorDataset(torch.arange(20)), Counted(5)
    for loader in (
        DataLoader(data, 1, sampler=sampler),
        DataLoader(data, batch_sampler=BatchSampler(sampler, 1, False)),
    ):
        sampler.set_epoch(5)
        repeating = RepeatingLoader(loader)
        assert [int(next(repeating)[0]) for _ in range(3)] == [5, 6, 7]


def inferred(zero: dict[str, Any], path: str) -> tuple[float, list[str]]:
    """Evaluate with an engine without an optimizer, and try to train.

    Args:
        zero: entries of the zero_optimization block.
        path: folder for files.

    Returns:
        Largest difference of outputs and state dict from the plain model, and the errors of calls that train.
    """
    model, whole = model_of(), model_of()
    blocks = {key: {**value, "nvme_path": path} if value["device"] == "nvme" else value for key, value in zero.items()}
    config = settings(zero=blocks)
    del config["optimizer"], config["scheduler"]
    engine, optimizer, _, scheduler = zeropp.initialize(model=model, config=config)
    assert optimizer is None and scheduler is None
    engine.eval()
    with torch.no_grad():
        found = [apart(engine(batch(number, 0)), whole(batch(number, 0))) for number in range(3)]
    told = []
    for call in (lambda: engine.backward(torch.zeros(())), engine.step, engine.get_lr):
        with pytest.raises(RuntimeError) as caught:
            call()
        told.append(str(caught.value))
    state = worst(dict(engine.module.state_dict()), dict(whole.state_dict()))
    engine.destroy()
    return max(*found, state), told


@pytest.mark.parametrize(
    "zero", [{}, {"offload_param": {"device": "cpu"}}, {"offload_param": {"device": "nvme"}}], ids=str
)
@pytest.mark.parametrize("world", [1, 2])
def test_inference_without_an_optimizer(world: int, zero: dict[str, Any], tmp_path: Path) -> None:
    for distance, told in run_ranks(world, inferred, zero, str(tmp_path)):
        assert distance == 0 and len(told) == 3 and all("made without one, for inference" in each for each in told)


def evaluated(stage: int, device: str, path: str) -> tuple[float, list[str]]:
    """Evaluate with a configuration for training, which offloads states, but without an optimizer.

    Args:
        stage: ZeRO stage.
        device: device of the offload.
        path: folder for files.

    Returns:
        Difference of a forward from the plain model's, and warnings.
    """
    model, whole = model_of(), model_of()
    block = {"device": device, "nvme_path": path}
    zero = {"stage": stage, "offload_optimizer": block, **({"offload_param": block} if stage == 3 else {})}
    config = settings(zero=zero)
    del config["optimizer"], config["scheduler"]
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        engine, *_ = zeropp.initialize(model=model, config=config)
        return apart(engine(batch(0, 0)), whole(batch(0, 0))), [str(each.message) for each in caught]


@pytest.mark.every(4)
@pytest.mark.parametrize(("stage", "device"), [(3, "cpu"), (3, "nvme"), (0, "cpu"), (2, "cpu")])
def test_where_states_would_lie_does_not_matter_without_an_optimizer(stage: int, device: str, tmp_path: Path) -> None:
    """Trainer and Accelerate use such configurations to evaluate, and TRL for its reference model (stage 0)."""
    for rank, (distance, said) in enumerate(run_ranks(2, evaluated, stage, device, str(tmp_path))):
        assert distance == 0
        assert sum("offload_optimizer has no effect: there is no optimizer" in each for each in said) == (rank == 0)


def contradicted() -> tuple[float, set[bool], bool]:
    """Initialize with batch sizes that contradict each other, and then with valid ones.

    Returns:
        Difference of a forward after the error, values of requires_grad, and True if the second call wraps the model.
    """
    model, whole = model_of(), model_of()
    with pytest.raises(zeropp.ConfigError, match="world size 2 do not agree"):
        zeropp.initialize(model=model, config={"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4})
    distance = apart(model(batch(0, 0)), whole(batch(0, 0)))
    trained = {parameter.requires_grad for parameter in model.parameters()}
    return distance, trained, zeropp.initialize(model=model, config=settings())[1] is not None


def test_sizes_that_contradict_each_other_leave_the_model_as_it_was() -> None:
    assert run_ranks(2, contradicted) == [(0.0, {True}, True)] * 2


def compiled() -> list[list[float]]:
    found = []
    for backend in (None, "aot_eager"):
        engine = zeropp.initialize(model=model_of(), config=settings())[0]
        assert not engine.is_compiled
        if backend:
            engine.compile(backend=backend)
            assert engine.is_compiled and engine.module._compiled_call_impl is not None
        found.append(train(engine, 0, 2)[0])
    with pytest.raises(ValueError, match="no schedule and no compiled autograd"):
        engine.compile(schedule=[(0, [])])
    return found


@pytest.mark.campaign
def test_a_compiled_model_trains_alike() -> None:
    for plain, other in run_ranks(2, compiled, timeout=100):
        assert other == pytest.approx(plain, rel=1e-12)


@contextlib.contextmanager
def without_hooks(engine: Any) -> Iterator[Any]:
    """Gather all parameters and remove the engine's hooks inside the context, as trainers do to generate."""
    with zeropp.zero.GatheredParameters(engine.module.parameters()):
        offload = engine.optimizer.parameter_offload
        for module in offload.module.modules():
            own = module.named_parameters(recurse=False)
            for _, parameter in itertools.chain(own, module.ds_external_parameters()):
                parameter.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield engine.module
        offload._register_deepspeed_module(offload.module)


def generates() -> list[float]:
    engine, plain = zeropp.initialize(model=model_of(), config=settings())[0], model_of()
    losses = train(engine, 0, 1)[0]
    with torch.no_grad():
        plain.load_state_dict(zeropp.full_state(engine.module))
    with without_hooks(engine) as model, torch.no_grad():
        # Each rank may run a different number of forwards.
        far = [apart(model(batch(n, 0)), plain(batch(n, 0))) for n in range(2 + torch.distributed.get_rank())]
    assert not engine.optimizer.parameter_offload.param_coordinator.is_invalid_trace()
    return [max(far), *losses, *train(engine, 1, 2)[0]]


def plainly() -> list[float]:
    engine = zeropp.initialize(model=model_of(), config=settings())[0]
    return [0.0, *train(engine, 0, 2)[0]]


def test_a_trainer_that_takes_hooks_off_to_generate() -> None:
    assert run_ranks(2, generates) == run_ranks(2, plainly)


def recomputed(kind: str, around: bool, reentrant: bool) -> list[float]:
    """Train in 16 bits on batches of another dtype.

    Args:
        kind: "bf16" or "fp16".
        around: True to run the whole engine under torch's activation checkpointing.
        reentrant: value of ``use_reentrant``.

    Returns:
        Losses of this rank.
    """
    engine = zeropp.initialize(model=model_of(), config=settings(**{kind: {"enabled": True}}))[0]
    losses = []
    for number in range(4):
        x = batch(number, torch.distributed.get_rank()).requires_grad_()
        found = checkpoint(engine, x, use_reentrant=reentrant) if around else engine(x)
        loss = found.float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "reentrant"), spread(["bf16", "fp16"], [False, True], 2))
def test_checkpointing_around_the_whole_model(kind: str, reentrant: bool) -> None:
    """Inputs are cast in the forward and again in the recomputation, so losses are equal bit for bit."""
    plainly, found = (run_ranks(2, recomputed, kind, around, reentrant) for around in (False, True))
    assert found == plainly and plainly[0][3] != plainly[0][0]


class Inward(torch.nn.Module):
    """A model that calls itself once, with an argument that must stay float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if scale is None:
            found: torch.Tensor = self(x, torch.tensor([1003.3]))
            return found
        assert scale.dtype == torch.float32
        return self.layer(x) * scale.to(x.dtype)


def inward() -> torch.dtype:
    config = settings(bf16={"enabled": True})
    return zeropp.initialize(model=Inward(), config=config)[0](torch.ones(2, 4)).dtype


def test_a_model_that_calls_itself_has_its_outer_inputs_cast_alone() -> None:
    assert run_ranks(2, inward) == [torch.bfloat16] * 2


def salient() -> float:
    """Return the difference from plain torch of a gradient with respect to the inputs of a frozen model."""
    engine, plain = zeropp.initialize(model=model_of(), config=settings())[0], model_of()
    engine.module.requires_grad_(False)
    x, same = (batch(0, torch.distributed.get_rank()).requires_grad_() for _ in range(2))
    (found,) = torch.autograd.grad(engine(x).square().mean(), x)
    (wanted,) = torch.autograd.grad(plain(same).square().mean(), same)
    return apart(found, wanted)


def test_gradients_of_inputs_alone() -> None:
    assert run_ranks(2, salient) == [0.0, 0.0]
