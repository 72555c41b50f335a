"""``zeropp.initialize`` and its engine train like plain torch: windows, counters, batch sizes, and several engines."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_engine import MICRO, RATES, STEPS, WARMUP, loss_of, model_of, settings, train
from tests.support.rank_pool import run_ranks, some
from zeropp.deepspeed.initialization import _device


def trained(config: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Any]]:
    model = model_of()
    engine, optimizer, loader, scheduler = zeropp.initialize(model=model, config=config)
    assert loader is None and optimizer is engine.optimizer and scheduler is engine.lr_scheduler
    assert isinstance(optimizer, zeropp.ZeroOptimizer) and engine.module is model
    losses, rates = train(engine, 0, STEPS)
    told = {
        "micro_steps": engine.micro_steps,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "batch": engine.get_batch_info(),
        "norm": engine.get_global_grad_norm(),
    }
    return losses, rates, zeropp.full_state(model), told


def plain(world: int) -> tuple[list[list[float]], float, dict[str, Tensor]]:
    """Train the model of `trained` in one process of plain torch.

    Args:
        world: number of ranks whose batches are used.

    Returns:
        Losses of each rank's micro-batches, the last gradient norm, and the weights.
    """
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        for number in range(step * MICRO, (step + 1) * MICRO):
            for rank in range(world):
                loss = loss_of(model, number, rank)
                (loss / (MICRO * world)).backward()
                losses[rank].append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, float(norm), model.state_dict()


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_trains_as_plain_torch(world: int, stage: int) -> None:
    """Weights agree to 1e-12 in float64; only the order of additions differs."""
    losses, norm, state = plain(world)
    for rank, (found, rates, weights, told) in enumerate(run_ranks(world, trained, settings(zero={"stage": stage}))):
        assert found == pytest.approx(losses[rank], rel=1e-12) and rates == pytest.approx(RATES)
        assert worst(weights, state) < 1e-12
        assert told == {
            "micro_steps": STEPS * MICRO, "global_steps": STEPS, "global_samples": STEPS * MICRO * 3 * world,
            "skipped_steps": 0, "batch": (MICRO * 3 * world, 3, MICRO), "norm": pytest.approx(norm),
        }  # fmt: skip


def given_otherwise(how: str, folder: Path) -> list[float]:
    """Train with arguments of ``initialize`` given in another form.

    Args:
        how: form of the arguments, such as "objects" or "path in args".
        folder: folder for a configuration file.

    Returns:
        Losses of this rank.
    """
    config, model = settings(), model_of()
    given: dict[str, Any] = {"config": config}
    if how == "objects":
        del config["optimizer"], config["scheduler"]
        inner = torch.optim.AdamW([{"params": []}, {"params": model.parameters()}], lr=0.1, weight_decay=0.1)
        scheduler = zeropp.deepspeed.schedulers.WarmupLR(inner, **WARMUP)
        given |= {"optimizer": inner, "lr_scheduler": scheduler}
    elif how == "functions":
        del config["optimizer"], config["scheduler"]
        given |= {
            "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
            "lr_scheduler": lambda optimizer: zeropp.deepspeed.schedulers.WarmupLR(optimizer, **WARMUP),
        }
    elif how == "path in args":
        path = folder / "zero.json"
        if dist.get_rank() == 0:
            path.write_text(json.dumps(config))
        dist.barrier()
        given = {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=-1)}
    elif how == "base64 in a dict":
        given = {"args": {"deepspeed_config": base64.urlsafe_b64encode(json.dumps(config).encode()).decode()}}
    else:
        given = {"config_params": config, "model_parameters": model.parameters()}
    engine, _, _, scheduler = zeropp.initialize(model=model, **given)
    if how == "path in args":
        # Scripts use local_rank to find the first rank of a node, and torchrun does not pass the argument.
        assert given["args"].local_rank == engine.local_rank == dist.get_rank()
    assert engine.config["zero_optimization"]["stage"] == 3 and type(engine.config) is dict
    assert scheduler is engine.lr_scheduler is not None
    # Libraries add groups without parameters, which are accepted.
    assert len(engine.optimizer.param_groups) == 1 + (how == "objects")
    return train(engine, 0, STEPS)[0]


@pytest.mark.parametrize("how", some(["objects", "functions", "path in args", "base64 in a dict", "older names"], 2))
def test_other_ways_to_give_parts(how: str, tmp_path: Path) -> None:
    wanted, _, _ = plain(2)
    for rank, losses in enumerate(run_ranks(2, given_otherwise, how, tmp_path)):
        assert losses == pytest.approx(wanted[rank], rel=1e-12)


def windows() -> list[str]:
    """Return errors of windows whose boundaries the caller sets, and of calls inside no_sync() and similar blocks."""
    engine, optimizer, _, _ = zeropp.initialize(model=model_of(), config=settings())
    wrong, rank = [], dist.get_rank()

    def look(what: str, found: object, wanted: object) -> None:
        if found != wanted:
            wrong.append(f"{what}: {found}, expected {wanted}")

    # Accelerate sets the boundary for each of three micro-batches and calls step() once.
    for number in range(3):
        engine.set_gradient_accumulation_boundary(number == 2)
        look(f"boundary {number}", engine.is_gradient_accumulation_boundary(), number == 2)
        engine.backward(loss_of(engine, number, rank) / 3, scale_wrt_gas=False)
    engine.step()
    look("after a forced boundary", (engine.was_step_applied(), engine.global_steps), (True, 1))
    first = zeropp.full_state(engine.module)
    twin = model_of()
    inner = torch.optim.AdamW(twin.parameters(), lr=0.0, weight_decay=0.1)
    for number in range(3):
        for each in range(2):
            (loss_of(twin, number, each) / 6).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    inner.step()
    look("weights", worst(first, twin.state_dict()) < 1e-12, True)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss_of(engine, 3, rank))
    engine.step()
    look("inside", (engine.was_step_applied(), engine.global_steps), (False, 1))
    optimizer.zero_grad(now=True)
    engine.set_gradient_accumulation_boundary(True)

    # Gradients of these blocks are sent together at the step. The weights must equal those without a block.
    states = []
    for block in (engine.coalesce_grad_reduction, engine.no_sync, None):
        engine.optimizer.inner.state.clear()
        with zeropp.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            for parameter, own in zip(engine.module.parameters(), model_of().parameters(), strict=True):
                parameter.data.copy_(own)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        if block is None:
            for number in range(2):
                engine.backward(loss_of(engine, number, rank))
        else:
            with block():
                for number in range(2):
                    engine.backward(loss_of(engine, number, rank))
                    with pytest.raises(RuntimeError, match="call it after the block"):
                        engine.step()
        engine.step()
        states.append(zeropp.full_state(engine.module))
    look("sent at once", max(worst(states[0], each) for each in states[1:]) < 1e-12, True)
    look("and stepped", worst(states[0], model_of().state_dict()) > 1e-3, True)
    return wrong


def test_windows_that_the_caller_ends() -> None:
    assert run_ranks(2, windows) == [[], []]


def unmanaged() -> tuple[int, int, bool]:
    config = settings(managed_gradient_accumulation=False)
    engine, *_ = zeropp.initialize(model=model_of(), config=config)
    with pytest.raises(RuntimeError, match="every step\\(\\) is a boundary"):
        engine.set_gradient_accumulation_boundary(True)
    for number in range(3):
        loss = loss_of(engine, number, dist.get_rank())
        # The caller divides by the 3 micro-batches that are run, and not by the 2 of the configuration.
        (engine.scale(loss / 3, scale_wrt_gas=False).backward() if number else engine.backward(loss / 3 * MICRO))
    engine.step()
    plain = model_of()
    for number in range(3):
        (sum(loss_of(plain, number, rank) for rank in range(2)) / 6).backward()  # type: ignore[union-attr]
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert engine.get_global_grad_norm() == pytest.approx(float(norm))
    return engine.global_steps, engine.global_samples, engine.was_step_applied()


def test_a_caller_who_owns_the_boundary() -> None:
    assert run_ranks(2, unmanaged) == [(1, 18, True)] * 2


def test_a_trainer_may_stay_on_the_cpu_of_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _device(argparse.Namespace(device_rank=0)) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert _device({"device_rank": None}) == torch.device("cuda", 1)
    assert _device({"device_rank": -1}) is None


def skipping() -> tuple[list[float], list[bool], int, int]:
    engine, *_ = zeropp.initialize(model=model_of(), config=settings(gradient_accumulation_steps=1))
    rates, applied = [], []
    for number in range(4):
        loss = loss_of(engine, number, dist.get_rank())
        engine.backward(loss * float("nan") if number == 2 and dist.get_rank() == 1 else loss)
        engine.step()
        rates.append(engine.get_lr()[0])
        applied.append(engine.was_step_applied())
    return rates, applied, engine.skipped_steps, engine.global_steps


def test_a_skipped_step_leaves_the_rate() -> None:
    for rates, applied, skipped, steps in run_ranks(2, skipping):
        assert rates == pytest.approx([0, 0.1 / 3, 0.1 / 3, 0.2 / 3])
        assert applied == [True, True, False, True] and (skipped, steps) == (1, 4)


def resized() -> list[Any]:
    engine, *_ = zeropp.initialize(model=model_of(), config=settings())
    found: list[Any] = []
    engine.set_train_batch_size(18)
    found.append(
        (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    )
    for number in range(3):
        engine.backward(loss_of(engine, number, dist.get_rank()))
        with pytest.raises(RuntimeError, match="micro-batches have come since the last step"):
            engine.set_train_batch_size(6)
        engine.step()
        found.append(engine.global_steps)
    engine.set_train_micro_batch_size(1)
    found.append(engine.get_batch_info())
    for wrong in (0, 7, -6):
        with pytest.raises(ValueError, match=f"train_batch_size {wrong} is no multiple of micro-batch size 1 x 2"):
            engine.set_train_batch_size(wrong)
    with pytest.raises(TypeError, match="expected an int"):
        engine.set_train_batch_size(16.0)  # type: ignore[arg-type]
    return found


def test_batch_sizes_can_be_changed() -> None:
    assert run_ranks(2, resized) == [[(18, 3, 3), 0, 0, 1, (6, 1, 3)]] * 2


def attributes() -> list[object]:
    model = model_of()
    model.nickname = "routed"
    engine, *_ = zeropp.initialize(model=model, config=settings(fp16={"enabled": False}))
    with pytest.raises(AttributeError, match="neither zeropp's Engine nor the model, a Routed, has 'missing'"):
        _ = engine.missing
    engine.eval()
    assert not model.training
    engine.train()
    return [
        engine.nickname, model.training, engine.zero_optimization_stage(), engine.zero_optimization(),
        engine.zero_optimization_partition_weights(), engine.gradient_clipping(), engine.fp16_enabled(),
        engine.bfloat16_enabled(), engine.zero_gather_16bit_weights_on_model_save(), engine.optimizer_name(),
        engine.scheduler_params()["warmup_num_steps"], engine.steps_per_print(), engine.get_mom(), engine.get_type(),
        engine.device.type, engine.world_size, engine.global_rank, sorted(engine.state_dict())[0],
    ]  # fmt: skip


def test_engine_attributes_have_the_configured_values() -> None:
    wanted = [
        "routed", True, 3, True, True, 1.0, False, False, False, "AdamW", 3, None, [(0.9, 0.999)], [None], "cpu", 2,
    ]  # fmt: skip
    for rank, found in enumerate(run_ranks(2, attributes)):
        assert found == [*wanted, rank, "module.blocks.0.lin.bias"]


def refused(what: str) -> str:
    config: dict[str, Any] = settings()
    given: dict[str, Any] = {"model": model_of(), "config": config}
    if what == "two":
        given["args"] = {"deepspeed_config": config}
    elif what == "none":
        given["config"] = None
    elif what == "model":
        given["model"] = None
    elif what == "optimizer":
        given["optimizer"] = "AdamW"
    elif what == "scheduler":
        given["lr_scheduler"] = 3
    elif what == "mesh":
        given["mesh_param"] = (2, 1)
    with pytest.raises((TypeError, ValueError)) as caught:
        zeropp.initialize(**given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("two", "as config and as args.deepspeed_config; give one of them"),
        ("none", "initialize() got no configuration"),
        ("model", "model is a NoneType; expected a torch.nn.Module"),
        ("optimizer", "optimizer is a str; expected a torch.optim.Optimizer, a function"),
        ("scheduler", "lr_scheduler is or returned 3, a int; expected an object with step()"),
        ("mesh", "mesh_param is not in zeropp"),
    ],
)
def test_unusable_arguments_of_initialize_are_refused(what: str, told: str) -> None:
    for message in run_ranks(2, refused, what):
        assert told in message


def alone() -> tuple[float, bool]:
    """Train without a launcher and without a process group.

    Returns:
        Loss after eight steps relative to the first loss, and True if a process group exists.
    """
    model = model_of()
    engine, *_ = zeropp.initialize(model=model, config=settings(gradient_accumulation_steps=1))
    before = loss_of(engine, 0, 0)
    for _ in range(8):
        engine.backward(loss_of(engine, 0, 0))
        engine.step()
    return float(loss_of(engine, 0, 0) / before), dist.is_initialized()


def test_a_process_alone_needs_no_group() -> None:
    env = {name: "" for name in ("RANK", "WORLD_SIZE")}
    ((ratio, grouped),) = run_ranks(1, without_variables, init=False, env=env)
    assert ratio < 1 and not grouped


def without_variables() -> tuple[float, bool]:
    import os

    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return alone()


def joins() -> tuple[int, int, float]:
    """Call init_distributed() twice with torchrun's variables, and take a step.

    Returns:
        Rank, world size and gradient norm.
    """
    zeropp.init_distributed()
    zeropp.init_distributed(dist_init_required=True)
    engine, *_ = zeropp.initialize(model=model_of(), config=settings(gradient_accumulation_steps=1))
    engine.backward(loss_of(engine, 0, dist.get_rank()))
    engine.step()
    return dist.get_rank(), dist.get_world_size(), engine.get_global_grad_norm()


def test_init_distributed_joins_the_group_of_the_launcher() -> None:
    first, second = run_ranks(2, joins, init=False)
    assert first[:2] == (0, 2) and second[:2] == (1, 2) and first[2] == second[2] > 0


def two_engines() -> list[float]:
    """Train two engines by turns. Each must train like a single engine."""
    pair = [zeropp.initialize(model=model_of(), config=settings(gradient_accumulation_steps=1))[0] for _ in range(2)]
    distances = []
    for engine in pair:
        for number in range(2):
            engine.backward(loss_of(engine, number, dist.get_rank()))
            pair[0].eval(), pair[0].train()
            engine.step()
    distances.append(worst(zeropp.full_state(pair[0].module), zeropp.full_state(pair[1].module)))
    for engine in pair:
        engine.destroy()
    return distances


def test_two_engines_in_one_process() -> None:
    assert run_ranks(2, two_engines) == [[0.0], [0.0]]


def evaluated_before() -> tuple[float, float, float]:
    """Wrap a model for inference, then for training, while the inference engine still exists.

    Returns:
        Loss before and after wrapping for training, and the gradient norm of the first step.
    """
    model, rank = model_of(), dist.get_rank()
    config = settings(gradient_accumulation_steps=1)
    forward_only = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    evaluator, *_ = zeropp.initialize(model=model, config=forward_only)
    with torch.no_grad():
        before = loss_of(evaluator, 0, rank).item()
    model.requires_grad_(True)
    engine, *_ = zeropp.initialize(model=model, config=config)
    loss = loss_of(engine, 0, rank)
    engine.backward(loss)
    engine.step()
    return before, loss.item(), engine.get_global_grad_norm() or 0.0


def test_a_model_that_was_wrapped_for_inference_is_trained() -> None:
    plain = model_of()
    losses = [loss_of(plain, 0, rank) for rank in range(2)]
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    for loss, found in zip(losses, run_ranks(2, evaluated_before), strict=True):
        assert found == pytest.approx((loss.item(), loss.item(), norm), rel=1e-12)
