"""A small Llama with PEFT adapters, and the merged weights that plain torch and PEFT compute for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["TOKENS", "adapted", "outputs", "plain_merge"]

TOKENS = torch.arange(8).view(1, 8)
KINDS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "init_lora_weights": False},
    "IA3Config": {"feedforward_modules": ["v_proj"], "init_ia3_weights": False},
    "LoHaConfig": {"r": 2, "init_weights": False},
}


def adapted(kind: str = "LoraConfig", **more: Any) -> Any:
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], **KINDS[kind], **more}
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), getattr(peft, kind)(**settings))


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    found: Tensor = model(input_ids=TOKENS).logits
    return found


def plain_merge() -> dict[str, Tensor]:
    """Return the state dict after two steps of plain torch on the batches of all ranks and PEFT's merge."""
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        for rank in range(dist.get_world_size()):
            (model(input_ids=TOKENS + rank, labels=TOKENS).loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Tensor] = model.merge_and_unload().state_dict()
    return found
