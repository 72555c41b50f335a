"""One rank alone calls a small module of the model with gradients enabled, as PEFT does to read a prompt.

Such a forward gathers nothing, so it must not change the order of collectives, even while its graph is alive.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import worst
from tests.support.rank_pool import run_ranks

WIDTH, TOKENS = 16, torch.arange(4)


class Prompted(nn.Module):
    """Three blocks, one of them frozen, and a prompt of 64 elements, which the threshold of 100 makes persistent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt = nn.Embedding(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.prompt(TOKENS).mean(0)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def wrapped(stage: int) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    model = Prompted().double()
    inner = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100}
    config = {"zero_optimization": zero, "zeropp": {"unit_min_blocks": 0, "hang_timeout": 15}}
    return model, zeropp.ZeroOptimizer(inner, model, config)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    seed = torch.Generator().manual_seed(10 * step + rank)
    loss: Tensor = model(torch.randn(2, WIDTH, generator=seed, dtype=torch.float64)).square().mean()
    return loss


def trains(stage: int, who: int) -> float:
    """Train, while one rank alone calls the prompt before the first step, inside steps and between steps.

    Args:
        stage: ZeRO stage.
        who: rank that calls the prompt alone.

    Returns:
        Largest difference of weights from plain torch.
    """
    model, optimizer = wrapped(stage)
    plain, rank = Prompted().double(), dist.get_rank()
    steps = torch.optim.SGD(plain.parameters(), lr=0.5)
    wanted: Any = None
    if rank == who:
        # Gradients are enabled, and the whole model has not run before.
        assert torch.equal(model.prompt(TOKENS), plain.prompt(TOKENS))
    for step in range(5):
        loss = loss_of(model, step, rank)
        if rank == who and step in (1, 3):
            read = model.prompt(TOKENS).detach()
            assert torch.equal(read, plain.prompt(TOKENS))
        # All ranks add a penalty on the prompt. Its gradient must count, because backward goes through this graph.
        penalty = model.prompt(TOKENS).square().mean() if step > 2 else 0.0
        (loss + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.zero_grad()
        for other in range(2):
            penalty = plain.prompt(TOKENS).square().mean() if step > 2 else 0.0
            ((loss_of(plain, step, other) + penalty) / 2).backward()
        plain.blocks[1].weight.grad = None
        steps.step()
        if rank == who and step in (0, 1, 2):
            wanted = copy.deepcopy(plain.prompt.weight.detach())
            assert torch.allclose(model.prompt(TOKENS).detach(), wanted, rtol=0, atol=1e-12)
    assert (rank == who) == (wanted is not None)
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(2)
@pytest.mark.parametrize(("stage", "who"), [(1, 0), (2, 1), (3, 0), (3, 1)])
def test_one_rank_reads_a_part(stage: int, who: int) -> None:
    assert max(run_ranks(2, trains, stage, who)) < 1e-12


def keeps(stage: int, how: str) -> float:
    """Call the prompt on both ranks before each step, and free its graph at different times.

    Args:
        stage: ZeRO stage.
        how: "in a list" lets rank 0 keep all graphs but the first; "in a cycle" puts graphs into reference cycles, and
            only rank 0 collects these.

    Returns:
        Largest difference of weights from plain torch.
    """
    model, optimizer = wrapped(stage)
    plain, rank = Prompted().double(), dist.get_rank()
    steps, kept = torch.optim.SGD(plain.parameters(), lr=0.5), []
    gc.disable()
    try:
        for step in range(4):
            read: Any = [model.prompt(TOKENS).square().mean()]
            if how == "in a cycle":
                read.append(read)
            elif rank == 0 and step:
                kept.append(read)
            del read
            if rank == 0 and step:
                gc.collect()
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.zero_grad()
            for other in range(2):
                (loss_of(plain, step, other) / 2).backward()
            plain.blocks[1].weight.grad = None
            steps.step()
    finally:
        gc.enable()
    return worst(zeropp.full_state(model), plain.state_dict())


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["in a list", "in a cycle"])
@pytest.mark.parametrize("stage", [2, 3])
def test_how_long_a_rank_keeps_the_graph_of_a_part_does_not_matter(stage: int, how: str) -> None:
    assert max(run_ranks(2, keeps, stage, how)) < 1e-12


def counts_differ() -> str:
    model, optimizer = wrapped(2)
    held = [loss_of(model, number, 0) for number in range(2 + dist.get_rank())]
    try:
        held[-1].backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_error_gives_the_numbers_of_forwards() -> None:
    for said in run_ranks(2, counts_differ):
        assert "a backward after 2 forwards with gradients" in said and "after 3 forwards" in said


PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 12}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 6, "encoder_hidden_size": 40}),
    "prefix": (
        "PrefixTuningConfig",
        {"num_virtual_tokens": 6, "prefix_projection": True, "encoder_hidden_size": 24},
    ),
}


def of_peft(kind: str) -> Any:
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    name, settings = PROMPTS[kind]
    return peft.get_peft_model(
        transformers.LlamaForCausalLM(config), getattr(peft, name)(task_type="CAUSAL_LM", **settings)
    )


def prompt_is_saved(kind: str) -> float:
    """Train a PEFT prompt for two steps, and let rank 0 alone make PEFT's state dict after each step.

    Args:
        kind: key of PROMPTS.

    Returns:
        On rank 0, the largest difference from PEFT's state dict of a plain model with the same weights; 0 on rank 1.
    """
    from peft import get_peft_model_state_dict

    model = of_peft(kind)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    extra = {"unit_min_blocks": 0, "hang_timeout": 15}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {"zero_optimization": zero, "zeropp": extra}
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(trained, lr=1e-3), model, config)
    distance = 0.0
    for step in range(2):
        tokens = torch.arange(8).view(1, 8) + step
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        full = zeropp.full_state(model)
        if dist.get_rank() == 0:
            plain = of_peft(kind)
            plain.load_state_dict(full)
            saved = get_peft_model_state_dict(model, state_dict=full)
            distance = max(distance, worst(saved, get_peft_model_state_dict(plain)))
    return distance


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_of_any_size_is_saved_by_one_rank(kind: str) -> None:
    """Prompts are persistent even if they are above the threshold, so PEFT can run their modules on one rank."""
    assert run_ranks(2, prompt_is_saved, kind) == [0.0, 0.0]
