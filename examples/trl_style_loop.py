"""Reinforcement learning with DeepSpeed's API in the way TRL and OpenRLHF use it; zeropp stands in for DeepSpeed.

    torchrun --standalone --nproc-per-node 2 examples/trl_style_loop.py

A small GPT, the policy, learns to write the letter "e" more often. Each step generates text with the policy, whose
weights are gathered once for all tokens. The policy before the update and a fixed reference model compute the
log-probabilities of the generated tokens. The loss is a clipped policy gradient plus a penalty on the distance to the
reference. A third model holds a moving average of the policy's weights.

The loop makes those calls of TRL and OpenRLHF that touch sharded weights: hooks are removed around generation, the
average is edited in GatheredParameters, and optimizer states are offloaded while the policy generates.
"""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from torch import Tensor, nn

import zeropp.compat.deepspeed

zeropp.compat.deepspeed.install()

import deepspeed  # noqa: E402  (found from here on)
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum  # noqa: E402

MODEL = GPTConfig(layers=2, d_model=64, heads=4, seq_len=32)
PROMPT, ROLLOUTS, LENGTH, WANTED = b"the ", 16, 20, ord("e")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROLLOUTS,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a small GPT write a letter.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rewards", type=Path, metavar="FILE", help="write the mean reward of each step as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers; not used")
    return parser.parse_args(argv)


def build(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(MODEL)


@contextmanager
def unwrapped_for_generation(engine: Any) -> Any:
    """Context that yields the model with full weights and without DeepSpeed's hooks, written as in TRL."""
    # zeropp's hooks are not in these lists, which are empty; the code shows that TRL's own code works unchanged.
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield engine.module
        offload._register_deepspeed_module(offload.module)


@torch.no_grad()
def rollout(model: nn.Module, draws: torch.Generator, device: torch.device) -> Tensor:
    """Return sampled tokens on the device, [ROLLOUTS, len(PROMPT) + LENGTH]; each row continues PROMPT."""
    tokens = torch.tensor([list(PROMPT)] * ROLLOUTS).to(device)
    for _ in range(LENGTH):
        odds = F.softmax(model(tokens)[:, -1].float(), dim=-1)
        # Draw on the CPU, so that a seed gives the same draws on every device.
        drawn = torch.multinomial(odds.cpu(), 1, generator=draws)
        tokens = torch.cat([tokens, drawn.to(device)], 1)
    return tokens


def likelihoods(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of the generated tokens (without the prompt), [ROLLOUTS, LENGTH]."""
    logits = model(tokens[:, :-1]).float()
    found = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    return found[:, -LENGTH:]


def policy_loss(now: Tensor, before: Tensor, reference: Tensor, reward: Tensor) -> Tensor:
    """Return PPO's clipped policy loss plus 0.02 times an estimate of the KL divergence from the reference."""
    advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None]
    ratio = (now - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    apart = (reference - now).exp() - (reference - now) - 1  # estimate of KL(policy || reference), never negative
    return (0.02 * apart - gain).mean()


def follow(average: nn.Module, model: nn.Module, decay: float = 0.9) -> None:
    """Move the average towards the model as in OpenRLHF: every rank makes the same edit inside GatheredParameters."""
    for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([parameter, kept]):
            kept.data.copy_(decay * kept.data + (1 - decay) * parameter.data)


def train(args: argparse.Namespace) -> list[float]:
    engine, *_ = deepspeed.initialize(model=build(), config=CONFIG)
    # Models without an optimizer are only used for forward passes.
    forward_only = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    reference, *_ = deepspeed.initialize(model=build(), config=forward_only)
    average, *_ = deepspeed.initialize(model=build(), config=forward_only)
    # Each rank draws its own rollouts.
    draws = torch.Generator().manual_seed(engine.global_rank)
    rewards = []
    for step in range(args.steps):
        # Free the optimizer states' memory on the device while the policy generates.
        engine.optimizer.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
        with unwrapped_for_generation(engine) as model:
            tokens = rollout(model, draws, engine.device)
        engine.reload_states()
        reward = (tokens[:, -LENGTH:] == WANTED).float().mean(-1)
        with torch.no_grad():
            before, usual = likelihoods(engine, tokens), likelihoods(reference, tokens)
        # Two steps on the same rollouts. The second step's policy differs from ``before``, so the loss clips the ratio.
        for _ in range(2):
            engine.backward(policy_loss(likelihoods(engine, tokens), before, usual, reward))
            engine.step()
        follow(average.module, engine.module)
        mean = reward.mean()
        if deepspeed.comm.is_initialized():
            deepspeed.comm.all_reduce(mean)
            mean /= deepspeed.comm.get_world_size()
        rewards.append(float(mean))
        if engine.global_rank == 0:
            print(f"step {step}: {rewards[-1]:.3f} of the letters are {chr(WANTED)!r}", flush=True)
    if args.rewards and engine.global_rank == 0:
        args.rewards.write_text(json.dumps(rewards))
    return rewards


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    deepspeed.init_distributed()
    try:
        train(args)
    finally:
        deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
