"""Reinforcement learning in the manner of TRL and OpenRLHF, written for DeepSpeed; zeropp stands in for it.

    torchrun --standalone --nproc-per-node 2 examples/trl_style_loop.py

A policy generates with its weights gathered once, a reference model and the policy of before say how likely that was,
and a clipped policy gradient with a penalty on leaving the reference makes the policy write more of the letter "e". An
average of its weights is kept beside it. The calls are those of the libraries: hooks taken off around generation, the
average edited in GatheredParameters, states offloaded while the model generates.
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
    """The model with whole weights and without hooks, as TRL has it."""
    offload = engine.optimizer.parameter_offload
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield engine.module
        offload._register_deepspeed_module(offload.module)


@torch.no_grad()
def rollout(model: nn.Module, draws: torch.Generator, device: torch.device) -> Tensor:
    """Tokens [ROLLOUTS, prompt and LENGTH] on the device, sampled by a generator on the CPU."""
    tokens = torch.tensor([list(PROMPT)] * ROLLOUTS).to(device)
    for _ in range(LENGTH):
        odds = F.softmax(model(tokens)[:, -1].float(), dim=-1)
        # Drawn on the CPU, so that a seed gives the same draws wherever the model is.
        drawn = torch.multinomial(odds.cpu(), 1, generator=draws)
        tokens = torch.cat([tokens, drawn.to(device)], 1)
    return tokens


def likelihoods(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities of what was generated, [ROLLOUTS, LENGTH]."""
    logits = model(tokens[:, :-1]).float()
    found = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    return found[:, -LENGTH:]


def policy_loss(now: Tensor, before: Tensor, reference: Tensor, reward: Tensor) -> Tensor:
    """Clipped policy gradient, and how far the policy is from the reference."""
    advantage = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None]
    ratio = (now - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    apart = (reference - now).exp() - (reference - now) - 1
    return (0.02 * apart - gain).mean()


def follow(average: nn.Module, model: nn.Module, decay: float = 0.9) -> None:
    """Move the average towards the model, both partitioned, as OpenRLHF does: every rank makes the same edit."""
    for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([parameter, kept]):
            kept.data.copy_(decay * kept.data + (1 - decay) * parameter.data)


def train(args: argparse.Namespace) -> list[float]:
    engine, *_ = deepspeed.initialize(model=build(), config=CONFIG)
    forward_only = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    reference, *_ = deepspeed.initialize(model=build(), config=forward_only)
    average, *_ = deepspeed.initialize(model=build(), config=forward_only)
    draws = torch.Generator().manual_seed(engine.global_rank)
    rewards = []
    for step in range(args.steps):
        engine.optimizer.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
        with unwrapped_for_generation(engine) as model:
            tokens = rollout(model, draws, engine.device)
        engine.reload_states()
        reward = (tokens[:, -LENGTH:] == WANTED).float().mean(-1)
        with torch.no_grad():
            before, usual = likelihoods(engine, tokens), likelihoods(reference, tokens)
        # Two steps on the same rollouts, which the clipping is for.
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
