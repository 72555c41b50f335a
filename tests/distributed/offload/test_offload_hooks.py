"""Step hooks that edit offloaded weights: the next forward computes with the edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import zeropp
from tests.support.branching_models import make_config
from tests.support.offload_pairs import host_apart
from tests.support.rank_pool import run_ranks, some
from tests.support.small_models import MODELS

KIND = MODELS["gpt"]
BF16 = {"bf16": {"enabled": True}}
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
FILES: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}, "aio": {"block_size": 1024}}
WEIGHTS: dict[str, Any] = {"offload_param": {"device": "nvme", "max_in_cpu": 0}}
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": CPU,
    "cpu, bf16": {**CPU, **BF16},
    "nvme": FILES,
    "nvme with weights, bf16": {**FILES, **WEIGHTS, **BF16},
    "codes": {**CPU, "zero_quantized_weights": True},
    "persistent, bf16": {**CPU, **BF16, "persist": 1000},
    "stage 2": {**CPU, "stage": 2},
}


def clamp(optimizer: torch.optim.Optimizer, *_: object) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.02, 0.02)


def train(settings: dict[str, Any], kind: Any, *, everywhere: bool, apart: bool) -> list[float]:
    """Return the losses of three steps with a step post-hook that clamps the weights.

    Args:
        settings: settings of the configuration.
        kind: optimizer class.
        everywhere: True to register the hook for all optimizers of torch, False for this one only.
        apart: True if host memory is separate from the device's memory, as with a GPU.
    """
    torch.manual_seed(3)
    model, losses = KIND.build().float(), []
    with host_apart(apart):
        inner = kind(model.parameters(), lr=3e-3, **({"fused": True} if kind is torch.optim.AdamW else {}))
        optimizer = zeropp.ZeroOptimizer(inner, model, make_config(**settings))
        register = register_optimizer_step_post_hook if everywhere else optimizer.register_step_post_hook
        handle = register(clamp)
        for step in range(3):
            optimizer.zero_grad()
            loss = KIND.loss(model, KIND.batch(torch.Generator().manual_seed(step)))
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        handle.remove()
        optimizer.close()
    return losses


@pytest.mark.every(12)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_next_forward_uses_edits_of_step_hooks(name: str, kind: Any, tmp_path: Path) -> None:
    """Losses equal those without offload, also if the host steps.

    AdamW steps on the host, and ``step()`` waits for that step before hooks run. RMSprop steps with its own code.
    """
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in SETTINGS[name].items()}
    plain = {key: value for key, value in settings.items() if key not in (*CPU, *FILES, *WEIGHTS)}
    for key in ("offload_optimizer", "offload_param"):
        if settings.get(key, {}).get("device") == "nvme":
            settings[key]["nvme_path"] = str(tmp_path)
    expected = run_ranks(2, train, plain, kind, everywhere=False, apart=False)
    assert run_ranks(2, train, settings, kind, everywhere=False, apart=True) == expected
    assert expected[0][0] != expected[0][1]


@pytest.mark.parametrize("apart", some([True, False], 2))
def test_hooks_of_all_optimizers_are_waited_for(apart: bool) -> None:
    plain = run_ranks(2, train, {}, torch.optim.AdamW, everywhere=True, apart=False)
    assert run_ranks(2, train, CPU, torch.optim.AdamW, everywhere=True, apart=apart) == plain
