"""PEFT merges adapters into frozen weights below stage 3, between passes and without GatheredParameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import worst
from tests.support.lora_models import TOKENS, adapted, outputs
from tests.support.rank_pool import run_ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 2, bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "stage 2, states on the host": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
}


def wrapped(name: str, model: Any) -> Any:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    return zeropp.initialize(model=model, config={**CONFIGS[name], "optimizer": optimizer, "gradient_clipping": 1.0})[0]


def train(engine: Any, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(input_ids=TOKENS + dist.get_rank(), labels=TOKENS).loss)
        engine.step()


def twin(model: Any, made: Any, name: str) -> Any:
    """Load a model's main weights into a plain model, and return it in the compute dtype.

    Args:
        model: wrapped model.
        made: new plain model.
        name: key of CONFIGS.
    """
    full = zeropp.full_state(model)
    made.load_state_dict(full)
    return made.bfloat16() if "bf16" in name else made


def merged(name: str, kind: str, safe: bool, folder: Path) -> list[float]:
    """Train, merge the adapters, and save the model.

    Args:
        name: key of CONFIGS.
        kind: class of PEFT's configuration.
        safe: value of ``safe_merge``; for LoRA True also means DoRA.
        folder: folder for the saved model.

    Returns:
        Differences from plain PEFT's merge: of the state dict, the output, the main weights, and on rank 0 the saved
        file.
    """
    import transformers

    more = {"use_dora": True} if kind == "LoraConfig" and safe else {}
    model = adapted(kind, **more)
    engine = wrapped(name, model)
    train(engine, 2)
    wanted = twin(model, adapted(kind, **more), name).merge_and_unload(safe_merge=safe)
    found = model.merge_and_unload(safe_merge=safe)
    state = wanted.state_dict()
    assert found.state_dict().keys() == state.keys()
    distances = [worst(found.state_dict(), state), worst({"": outputs(found)}, {"": outputs(wanted)})]
    full = zeropp.full_state(found)
    distances.append(worst({key: value.to(state[key].dtype) for key, value in full.items()}, state))
    if dist.get_rank() == 0:
        found.save_pretrained(folder)
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
        distances.append(worst(loaded.state_dict(), state))
    return distances


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("name", "kind", "safe"),
    [
        ("stage 2, states on the host", "LoraConfig", False),
        ("stage 1", "IA3Config", False),
        ("stage 2, bf16", "LoHaConfig", True),
        ("stage 2", "LoraConfig", True),
        *((name, "LoraConfig", False) for name in CONFIGS if "host" not in name),
    ],
)
def test_merge_and_unload_below_stage_3(name: str, kind: str, safe: bool, tmp_path: Path) -> None:
    for state, output, *rest in run_ranks(2, merged, name, kind, safe, tmp_path):
        assert state == max(rest) == 0.0
        # In bf16 the plain model has rounded its buffers, too, so outputs differ.
        assert output < (0.01 if "bf16" in name else 1e-6)


def goes_on(name: str) -> float:
    """Merge and unmerge adapters between steps, as TRL does to generate.

    Returns:
        Largest difference of weights from a run that was never merged.
    """
    model, other = adapted(), adapted()
    engine, beside = wrapped(name, model), wrapped(name, other)
    for _ in range(3):
        train(engine)
        train(beside)
        before = outputs(engine)
        model.merge_adapter()
        assert torch.allclose(outputs(engine), before, rtol=0, atol=1e-5)
        model.unmerge_adapter()
    return worst(zeropp.full_state(model), zeropp.full_state(other))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 2", "stage 0"])
def test_training_goes_on_after_a_merge_that_was_undone(name: str) -> None:
    assert max(run_ranks(2, goes_on, name)) < 1e-6


def one_rank_alone(name: str, folder: Path) -> list[str]:
    """Merge adapters and save on rank 0 only, which needs no other rank, and make collective calls afterwards.

    Args:
        name: key of CONFIGS.
        folder: folder for files.

    Returns:
        The error of each collective call on this rank.
    """
    model = adapted()
    engine = wrapped(name, model)
    train(engine)
    wanted = twin(model, adapted(), name).merge_and_unload().state_dict()
    if dist.get_rank() == 0:
        model.merge_adapter()
        state = model.get_base_model().state_dict()
        found = {key.replace(".base_layer", ""): value for key, value in state.items() if "lora_" not in key}
        assert worst(found, wanted) == 0.0
    calls: list[Callable[[], object]] = [
        lambda: zeropp.full_state(model),
        lambda: engine.save_checkpoint(folder),
        lambda: zeropp.checkpoint.export(folder / "out", model),
        lambda: train(engine),
    ]
    said = []
    for call in calls:
        if len(said) == 3 and dist.get_rank() == 0:
            # A merged model computes no gradients of adapters. Unmerging leaves rounding errors in the weights, so the
            # step must still be refused.
            model.unmerge_adapter()
        with pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))
    return said


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["stage 2", "stage 0"])
def test_a_merge_by_one_rank_alone_is_not_mixed_with_others(name: str, tmp_path: Path) -> None:
    for *collective, step in run_ranks(2, one_rank_alone, name, tmp_path):
        assert all("different edits of frozen weights, as by merge_and_unload()" in text for text in collective)
        assert "No weight was changed by this step" in step
