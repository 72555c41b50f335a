"""Tiny models of common families from transformers and peft, randomly initialised and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FAMILIES", "Family"]

VOCABULARY, LENGTH, ROWS, WIDTH = 64, 12, 2, 32
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        make: builds the model; the model returns its loss.
        batch: makes a batch from a generator.
        rate: learning rate.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    rate: float = 1e-3


def _tokens(generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _pixels(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 4, (ROWS,), generator=generator),
    }


def _pairs(generator: torch.Generator) -> Batch:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
        "return_loss": torch.tensor(True),
    }


def _speech(generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(ROWS, 8, 40, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator),
    }


def _waves(generator: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(ROWS, 800, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (ROWS, 4), generator=generator),
    }


def _made(model: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
_ENCODER = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def llama() -> nn.Module:
    return _made("LlamaForCausalLM", "LlamaConfig", **_DECODER)


def gpt2() -> nn.Module:
    return _made(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=2,
        n_positions=2 * LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def bert() -> nn.Module:
    return _made("BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, **_ENCODER)


def t5() -> nn.Module:
    return _made(
        "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH,
        num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def bart() -> nn.Module:
    return _made(
        "BartForConditionalGeneration", "BartConfig", vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH, max_position_embeddings=2 * LENGTH, dropout=0.0, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip


def vit() -> nn.Module:
    return _made("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, num_labels=4, **_ENCODER)


def resnet() -> nn.Module:
    return _made(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2],
        num_labels=4, layer_type="basic",
    )  # fmt: skip


def mixtral() -> nn.Module:
    return _made("MixtralForCausalLM", "MixtralConfig", num_local_experts=8, num_experts_per_tok=1, **_DECODER)


def mamba() -> nn.Module:
    return _made(
        "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2,
    )  # fmt: skip


def whisper() -> nn.Module:
    return _made(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCABULARY, num_mel_bins=8, d_model=WIDTH,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH, max_source_positions=20, max_target_positions=2 * LENGTH, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip


def wav2vec() -> nn.Module:
    """Return a Wav2Vec2 model, whose positional convolution uses weight_norm."""
    return _made(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=WIDTH, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
        mask_time_prob=0.0, ctc_zero_infinity=True,
    )  # fmt: skip


def clip() -> nn.Module:
    tower = {**_ENCODER, "projection_dim": 16}
    text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH, "eos_token_id": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    return _made("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)


def adapters() -> nn.Module:
    """Return a frozen decoder with LoRA adapters."""
    import peft

    settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(llama(), settings)  # type: ignore[arg-type]


FAMILIES: dict[str, Family] = {
    "decoder, llama": Family(llama, _tokens),
    "decoder, gpt2": Family(gpt2, _tokens),
    "encoder, bert": Family(bert, _tokens),
    "encoder-decoder, t5": Family(t5, _tokens),
    "encoder-decoder, bart": Family(bart, _tokens),
    "vision, vit": Family(vit, _pixels),
    "vision, resnet": Family(resnet, _pixels),
    "experts, mixtral": Family(mixtral, _tokens),
    "state space, mamba": Family(mamba, _tokens),
    "speech, whisper": Family(whisper, _speech),
    "speech, wav2vec": Family(wav2vec, _waves),
    "two towers, clip": Family(clip, _pairs),
    "adapters, lora": Family(adapters, _tokens, 3e-2),
}
