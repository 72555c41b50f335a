"""``zeropp.integrations.accelerate.prepare``: Accelerate's training loop gives the results of one process."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zeropp
from tests.support.branching_models import worst
from tests.support.deepspeed_stand_in import LR, Net, distance, loss_of
from tests.support.lora_models import TOKENS, adapted, outputs, plain_merge
from tests.support.rank_pool import run_ranks

pytest.importorskip("accelerate", reason="accelerate is not installed")

CONFIG = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "zeropp": {"unit_min_blocks": 0}}
MICRO, MAX_NORM, EPSILON = 2, 0.3, 1e-12


class Rows(Dataset):
    def __init__(self, count: int = 32) -> None:
        self.rows = torch.randint(12, (32, 5), generator=torch.Generator().manual_seed(3))[:count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


@contextlib.contextmanager
def accelerator_of(**given: Any) -> Iterator[Any]:
    """Yield an Accelerator, and reset Accelerate's global state before and after, because ranks run many tests."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        yield Accelerator(cpu=True, **given)
    finally:
        AcceleratorState._reset_state(True)


def looped(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any, first: int, last: int
) -> list[float]:
    """Run the training loop of Accelerate's documentation, and return the norms before clipping.

    Args:
        accelerator: the Accelerator.
        model: prepared model.
        optimizer: prepared optimizer.
        scheduler: prepared scheduler.
        loader: prepared loader.
        first: first micro-batch to train on.
        last: micro-batch to stop before.
    """
    norms = []
    for number, ids in enumerate(loader):
        if not first <= number < last:
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms


def parts(accelerator: Any, config: Any = CONFIG, rows: int = 32) -> tuple[Any, Any, Any, Any]:
    """Return a prepared model, optimizer, scheduler and loader.

    Args:
        accelerator: the Accelerator.
        config: zeropp's configuration.
        rows: number of samples.
    """
    from zeropp.integrations.accelerate import prepare

    model = Net()
    inner = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
    loader = accelerator.prepare(DataLoader(Rows(rows), batch_size=2))
    return (*prepare(accelerator, model, inner, scheduler, config=config), loader)


def plain(last: int) -> tuple[nn.Module, list[float]]:
    """Train in one process on the batches of both ranks; the last window may have fewer than ``MICRO`` micro-batches.

    Args:
        last: number of micro-batches.

    Returns:
        The model, and the norms before clipping.
    """
    model, norms, rows = Net(), [], Rows(last * 4).rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(-(-last // MICRO)):
        optimizer.zero_grad()
        # With two processes, Accelerate steps a schedule twice per optimizer step.
        optimizer.param_groups[0]["lr"] = LR / (1 + 2 * step)
        for ids in rows[step * MICRO * 4 : (step + 1) * MICRO * 4].split(4):
            (nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / MICRO).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return model, norms


def trained(folder: Path) -> dict[str, Any]:
    """Train, and train again with a save and a load into new objects half-way.

    Args:
        folder: folder of the saved state.

    Returns:
        Norms before clipping, and the difference of the weights from one process without ("weights") and with
        ("resumed") the save and load.
    """
    found: dict[str, Any] = {}
    with accelerator_of(gradient_accumulation_steps=MICRO) as accelerator:
        model, optimizer, scheduler, loader = parts(accelerator)
        found["norms"] = looped(accelerator, model, optimizer, scheduler, loader, 0, 8)
        found["weights"] = distance(zeropp.full_state(accelerator.unwrap_model(model)), plain(8)[0])
        # Accelerate must leave objects that are prepared already as they are.
        assert accelerator.prepare(model, optimizer) == (model, optimizer)
    with accelerator_of(gradient_accumulation_steps=MICRO) as accelerator:
        model, optimizer, scheduler, loader = parts(accelerator)
        looped(accelerator, model, optimizer, scheduler, loader, 0, 4)
        accelerator.save_state(str(folder))
    with accelerator_of(gradient_accumulation_steps=MICRO) as accelerator:
        torch.manual_seed(99)
        model, optimizer, scheduler, loader = parts(accelerator)
        accelerator.load_state(str(folder))
        norms = looped(accelerator, model, optimizer, scheduler, loader, 4, 8)
        found["resumed"] = distance(zeropp.full_state(model), plain(8)[0])
        assert norms == found["norms"][2:]
    return found


def test_own_loop_as_one_process(tmp_path: Path) -> None:
    """Accumulation, clipping by the whole model's norm, a schedule, saving and resuming are exact in float64."""
    _, norms = plain(8)
    for found in run_ranks(2, trained, tmp_path):
        assert found["norms"] == pytest.approx(norms, rel=EPSILON)
        assert found["weights"] < EPSILON and found["resumed"] < EPSILON
    assert (tmp_path / "zeropp").is_dir() and not list(tmp_path.glob("model*")) and not list(tmp_path.glob("optim*"))


def cut_short() -> tuple[float, list[float]]:
    """Train seven micro-batches in windows of two, and return the difference from one process and the norms."""
    with accelerator_of(gradient_accumulation_steps=MICRO) as accelerator:
        model, optimizer, scheduler, loader = parts(accelerator, rows=28)
        norms = looped(accelerator, model, optimizer, scheduler, loader, 0, 7)
        return distance(zeropp.full_state(model), plain(7)[0]), norms


def test_a_short_last_window_is_a_step() -> None:
    """Accelerate also steps at the end of the data."""
    for apart, norms in run_ranks(2, cut_short):
        assert apart < EPSILON and norms == pytest.approx(plain(7)[1], rel=EPSILON) and len(norms) == 4


def in_bfloat16() -> tuple[float, str, str]:
    """Run a forward in bf16 with zeropp and with Accelerate alone.

    Returns:
        The difference of the losses, and the dtypes of both outputs.
    """
    with accelerator_of(mixed_precision="bf16") as accelerator:
        from zeropp.integrations.accelerate import prepare

        model = Net().float()
        model, *_ = prepare(accelerator, model, torch.optim.AdamW(model.parameters()), config=CONFIG)
        loss = loss_of(model, 0, dist.get_rank())
        ours = str(model(torch.zeros(1, 2, dtype=torch.long)).dtype)
        other = accelerator.prepare_model(Net().float(), device_placement=False, evaluation_mode=True)
        wanted = loss_of(other, 0, dist.get_rank())
        return abs(float(loss - wanted)), ours, str(other(torch.zeros(1, 2, dtype=torch.long)).dtype)


def test_bfloat16_is_accelerates_autocast() -> None:
    for difference, ours, theirs in run_ranks(2, in_bfloat16):
        assert difference == 0 and ours == theirs == "torch.float32"


def two_models() -> tuple[float, bool]:
    """Clip a second model, which is not prepared, and drop the first one.

    Returns:
        Norm of the second model's gradient, and True if the first model's memory is free.
    """
    with accelerator_of() as accelerator:
        model, optimizer, _, _ = parts(accelerator)
        critic = nn.Linear(3, 1)
        critic.weight.grad = torch.full((1, 3), 2.0)
        norm = accelerator.clip_grad_norm_([critic.weight], 1.0)
        gone = weakref.ref(model)
        del model, optimizer, _
        gc.collect()
        return float(norm), gone() is None


def test_beside_another_model_and_let_go() -> None:
    """Clipping the parameters of another model uses Accelerate's own function. The accelerator keeps no model alive."""
    assert run_ranks(2, two_models) == [(pytest.approx(12**0.5), True)] * 2


def refusals() -> list[str]:
    """Return the messages of settings and calls that are refused."""
    from zeropp.config import ConfigError
    from zeropp.integrations.accelerate import prepare

    said = []

    def refused(kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))

    with accelerator_of() as accelerator:
        model = Net()
        inner = torch.optim.AdamW(model.parameters())
        for more in ({"gradient_accumulation_steps": 4}, {"gradient_clipping": 1.0}):
            refused(ConfigError, lambda more=more: prepare(accelerator, model, inner, config={**CONFIG, **more}))
        refused(TypeError, lambda: prepare(accelerator, model, inner, CONFIG))
        model, *_ = prepare(accelerator, model, inner, config=CONFIG)
        refused(ValueError, lambda: accelerator.clip_grad_norm_(model.head.parameters(), 1.0))
        refused(ValueError, lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
        refused(ValueError, lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
        accelerator.state.distributed_type = type(accelerator.distributed_type).FSDP
        refused(RuntimeError, lambda: prepare(accelerator, Net(), inner))
    return said


def test_settings_that_would_be_applied_twice_are_refused() -> None:
    """Settings that both Accelerate and zeropp would apply are refused, and clipping that zeropp does not offer."""
    for said in run_ranks(2, refusals):
        for text, part in zip(
            said, ["leave them", "leave them", "config=", "2 of the", "norm_type 1", "value", "FSDP"], strict=True
        ):
            assert part in text, said


def merged_under_accelerate(stage: int) -> tuple[float, float, float]:
    """Merge adapters between steps, and for good after training.

    Args:
        stage: ZeRO stage.

    Returns:
        Differences of the outputs while adapters are merged, of the finally merged weights from plain torch, and of the
        full state from plain torch.
    """
    from zeropp.integrations.accelerate import prepare

    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = {"zero_optimization": {"stage": stage}}
    with accelerator_of() as accelerator:
        model, optimizer = prepare(accelerator, model, optimizer, config=config)
        for _ in range(2):
            before = outputs(model)
            model.merge_adapter()
            between = worst({"": outputs(model)}, {"": before})
            model.unmerge_adapter()
            accelerator.backward(model(input_ids=TOKENS + dist.get_rank(), labels=TOKENS).loss)
            optimizer.step()
            optimizer.zero_grad()
        wanted = plain_merge()
        found = accelerator.unwrap_model(model).merge_and_unload()
    return between, worst(found.state_dict(), wanted), worst(zeropp.full_state(found), wanted)


@pytest.mark.campaign
@pytest.mark.every(2)
@pytest.mark.parametrize("stage", [2, 0])
def test_accelerate_s_models_are_merged_as_in_plain_torch(stage: int) -> None:
    for distances in run_ranks(2, merged_under_accelerate, stage):
        assert max(distances) < 1e-5
