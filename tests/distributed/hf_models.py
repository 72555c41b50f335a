"""Tiny models of transformers with random weights; who imports this is skipped where transformers is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

__all__ = ["MODELS", "logits", "make"]

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

MODELS = {"llama": ("LlamaForCausalLM", "LlamaConfig"), "tied": ("LlamaForCausalLM", "LlamaConfig"),
          "t5": ("T5ForConditionalGeneration", "T5Config")}  # fmt: skip


def make(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    cls, config = (getattr(transformers, name) for name in MODELS[kind])
    if kind == "t5":
        return cls(config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)).eval()
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return cls(config(**settings, **heads, tie_word_embeddings=kind == "tied")).eval()


def logits(model: nn.Module) -> Tensor:
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        extra = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        out: Tensor = model(input_ids=tokens, **extra).logits
    return out
