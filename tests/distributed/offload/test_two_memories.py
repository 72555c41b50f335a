"""No kernel of training with offload mixes host tensors and device tensors, which a GPU would refuse.

The device is simulated on the CPU; see :mod:`tests.support.two_memories`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import Block, make_config
from tests.support.two_memories import Memories, two_memories
from zeropp.offload.read_ahead import Ring
from zeropp.params import wire_copy

WIDTH = 24  # a block of 256 elements is no whole number of rows of weights, so blocks end within rows
BF16 = {"bf16": {"enabled": True}}
CPU = {"offload_optimizer": {"device": "cpu"}}
WEIGHTS = {"offload_param": {"device": "cpu"}}
CODES = {"zero_quantized_nontrainable_weights": True}


@dataclass
class Training:
    """A model on the simulated device, and its optimizer.

    Attributes:
        memories: record of the storages that belong to the device.
        settings: settings of the configuration, as ``make_config`` takes them.
        folder: directory for checkpoints.
        frozen: True if the first block is frozen.
    """

    memories: Memories
    settings: dict[str, Any]
    folder: Path
    frozen: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.memories.take(*self.model.parameters())
        self.model[0].requires_grad_(not self.frozen)
        config = {**make_config(**self.settings), "gradient_clipping": 0.3, "gradient_accumulation_steps": 2}
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.optimizer = zeropp.ZeroOptimizer(inner, self.model, config)

    def loss(self, scale: float = 1.0) -> Tensor:
        x = torch.ones(8, WIDTH)
        self.memories.take(x)
        return self.model(x).square().mean() * scale

    def backward(self, scale: float = 1.0) -> None:
        for _ in range(2):
            self.optimizer.backward(self.loss(scale))

    def step(self, scale: float = 1.0) -> None:
        self.backward(scale)
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(t: Training) -> None:
    losses = [t.loss().item()]
    for _ in range(3):
        t.step()
        losses.append(t.loss().item())
    assert losses == sorted(losses, reverse=True), "it has not learned"


def read_groups(t: Training) -> None:
    """Read the parameter groups before each step, as schedulers do. The engine must then measure gradients again."""
    for _ in range(2):
        t.backward()
        assert all(group["lr"] > 0 for group in t.optimizer.param_groups)
        t.optimizer.step()
        t.optimizer.zero_grad()


def norms(t: Training) -> None:
    t.backward()
    t.optimizer.clip_grad_norm_(0.1)
    assert t.optimizer.grad_norms()
    t.optimizer.step()


def large(t: Training) -> None:
    """Take a step with gradients whose squares overflow float32, so that their norm is computed again in float64."""
    t.step(1e24)
    assert not t.optimizer.step_was_skipped


def skipped(t: Training) -> None:
    t.step(float("nan"))
    assert t.optimizer.step_was_skipped
    t.step()


def held(t: Training) -> None:
    with t.optimizer.no_sync():
        t.optimizer.backward(t.loss())
    t.optimizer.backward(t.loss())
    t.optimizer.step()


def states(t: Training) -> None:
    t.step()
    kept, weights = copy.deepcopy(t.optimizer.state_dict()), zeropp.full_state(t.model)
    t.step()
    t.optimizer.load_state_dict(kept)
    t.step()
    t.model.load_state_dict(weights)
    # With bf16 this load keeps the main weights, because they round to the loaded values.
    t.model.load_state_dict(t.model.state_dict())
    t.step()


def checkpoints(t: Training) -> None:
    t.step()
    zeropp.checkpoint.save(t.folder / "saved", t.model, t.optimizer)
    other = Training(t.memories, t.settings, t.folder, t.frozen)
    zeropp.checkpoint.load(t.folder / "saved", other.model, other.optimizer)
    other.step()
    other.optimizer.close()


def averages(t: Training) -> None:
    average = zeropp.ema(t.model, 0.9)
    t.step()
    average.update()
    with average.applied(), torch.no_grad():
        t.loss()
    t.step()


def parked(t: Training) -> None:
    t.step()
    t.optimizer.offload_states()
    zeropp.full_state(t.model)
    t.optimizer.reload_states()
    t.step()


def lent(t: Training) -> None:
    with zeropp.zero.GatheredParameters(list(t.model.parameters()), modifier_rank=0), torch.no_grad():
        t.model[0].lin.weight.mul_(0.5)
    t.step()


def unfrozen(t: Training) -> None:
    t.step()
    t.model.load_state_dict({name: 2 * value for name, value in zeropp.full_state(t.model).items()})
    t.step()
    t.model[0].requires_grad_(True)
    t.step()


WAYS = (plain, read_groups, norms, large, skipped, held, states, averages, parked, lent)
SETTINGS: dict[str, dict[str, Any]] = {
    "optimizer": CPU,
    "both, bf16": {**CPU, **WEIGHTS, **BF16},
    "a part": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    "stage 1, bf16": {**CPU, **BF16, "stage": 1, "overlap_comm": True},
    "qwZ, bf16": {**CPU, **BF16, "zero_quantized_weights": True},
    "files": {
        "aio": {"block_size": 1024},
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "nvme", "max_in_cpu": 0},
    },
}
CASES: list[tuple[str, Callable[[Training], None], dict[str, Any]]] = [
    *((f"{name}: {way.__name__}", way, {"settings": own}) for name, own in SETTINGS.items() for way in WAYS),
    *(
        (f"{name}: {way.__name__}, frozen {kind}", way, {"settings": {**SETTINGS[name], **own}, "frozen": True})
        for name in ("both, bf16", "files") for kind, own in (("values", {}), ("codes", CODES))
        for way in (unfrozen, checkpoints)
    ),
]  # fmt: skip


@pytest.mark.every(6)
@pytest.mark.parametrize(("way", "how"), [pytest.param(way, how, id=name) for name, way, how in CASES])
def test_no_kernel_gets_both(way: Callable[[Training], None], how: dict[str, Any], tmp_path: Path) -> None:
    settings = copy.deepcopy(how["settings"])
    for key in ("offload_optimizer", "offload_param"):
        if settings.get(key, {}).get("device") == "nvme":
            settings[key]["nvme_path"] = str(tmp_path / "swap")
    with two_memories() as memories:
        training = Training(memories, settings, tmp_path, how.get("frozen", False))
        way(training)
        training.optimizer.close()
        assert memories.crossed > 0, "nothing has left the device"


def test_new_weights_are_in_use_where_they_are_sent_on(tmp_path: Path) -> None:
    """New weights are marked as used on the stream that sends them (``used_here``).

    They are dropped as soon as their refresh is queued. Without the mark, the allocator may reuse their memory before
    the refresh has read it.
    """
    named: list[int] = []
    with (
        mock.patch.object(wire_copy, "used_here", lambda tensor: named.append(tensor.numel())),
        two_memories() as memories,
    ):
        training = Training(memories, SETTINGS["stage 1, bf16"], tmp_path)
        training.step()
        training.optimizer.engine.wait_for_refresh()
        buffers = training.optimizer.engine.trainable_buffers
        assert sorted(named[-len(buffers) :]) == sorted(buffer.shard.numel() for buffer in buffers)
        training.optimizer.close()


def test_staging_is_in_host_memory_with_any_default_device() -> None:
    with torch.device("meta"), Ring(2, 4096).taken() as buffer:
        assert buffer.device.type == "cpu"


@pytest.mark.parametrize("kernel", [torch.add, torch.Tensor.copy_, partial(torch.add, alpha=2)])
def test_the_pretended_device_refuses_to_mix_memories(kernel: Callable[..., Tensor]) -> None:
    with two_memories() as memories:
        own, other = torch.ones(2), torch.ones(2)
        memories.take(own)
        assert (
            (own + 1).device.index == 0 and torch.zeros_like(own).device.index == 0 and own.cpu().device.index is None
        )
        assert (own + torch.ones(())).device.index == 0, "a host scalar may be passed to a kernel"
        if kernel is torch.Tensor.copy_:
            assert kernel(other, own).device.index is None
            return
        for given in ((own, other), (other, own), (other, own[0])):
            with pytest.raises(RuntimeError, match="expected all tensors to be in one memory"):
                kernel(*given)
