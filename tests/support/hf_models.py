"""Tiny models of transformers with random weights.

A test module that imports this file is skipped if transformers is not installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

__all__ = ["MODELS", "logits", "make"]

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

MODELS = {"llama": ("LlamaForCausalLM", "LlamaConfig"), "tied": ("LlamaForCausalLM", "LlamaConfig"),
          "t5": ("T5ForConditionalGeneration", "T5Config"), "nomic": ("NomicBertModel", "NomicBertConfig"),
          "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
          "qwen": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig")}  # fmt: skip


def make(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    cls, config = (getattr(transformers, name) for name in MODELS[kind])
    if kind == "t5":
        return cls(config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)).eval()
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if kind == "mixtral":
        heads["num_local_experts"] = 4
    if kind == "qwen":
        heads |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        heads |= {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
    return cls(config(**settings, **heads, tie_word_embeddings=kind == "tied")).eval()


def logits(model: nn.Module) -> Tensor:
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        found = model(input_ids=tokens, **extra)
    out: Tensor = found["logits" if "logits" in found else "last_hidden_state"]
    return out
