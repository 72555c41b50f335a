"""A small Llama by transformers' Trainer, with a ZeRO-3 JSON of DeepSpeed's; zeropp stands in for DeepSpeed.

    python -m zeropp.compat.deepspeed torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
    python -m zeropp.compat.deepspeed torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --resume

It learns the text of this repository's licence, byte by byte; saves, evaluates, generates while the weights are
partitioned, and leaves a model that plain transformers loads. The script knows nothing of zeropp.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load_file
from text_data import Windows
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent / "LICENSE"


def collate(windows: list[Tensor]) -> dict[str, Tensor]:
    """Ids that are their own labels: the model moves them by one itself."""
    ids = torch.stack(windows)
    return {"input_ids": ids, "labels": ids}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama by transformers' Trainer.")
    parser.add_argument("--deepspeed", default=str(HERE / "zero3_auto.json"), help="DeepSpeed's JSON")
    parser.add_argument("--folder", default="runs/hf", help="checkpoints, and the model in the end")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    return parser.parse_args(argv)


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    more = {}
    if not torch.cuda.is_available():
        # Accelerate counts the ranks of GPUs alone, unless its state has been made before.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        more["accelerator_config"] = {"use_configured_state": True}
    return TrainingArguments(
        args.folder,
        deepspeed=args.deepspeed,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=10,
        logging_steps=10,
        save_steps=30,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        **more,
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    # Before the model: from here on transformers knows that weights are to be partitioned as they are made.
    training = training_arguments(args)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config)
    trainer = Trainer(
        model,
        training,
        data_collator=collate,
        train_dataset=Windows(TEXT, 63),
        eval_dataset=Windows(TEXT, 63, 64, seed=1),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.evaluate()
    prompt = torch.tensor([list(b"the terms of")], device=training.device)
    # On every rank, since each of them has a part of the weights.
    ids = trainer.model.generate(prompt, max_new_tokens=40, do_sample=False, synced_gpus=dist.is_initialized())
    trainer.save_model(str(Path(args.folder) / "final"))
    if trainer.is_world_process_zero():
        print(bytes(ids[0].tolist()).decode(errors="replace"))
        # By safetensors: from_pretrained is of all ranks, as long as the JSON says that models are to be partitioned.
        saved = load_file(Path(args.folder) / "final" / "model.safetensors")
        print(f"saved {sum(value.numel() for value in saved.values()):,} parameters in {args.folder}/final")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
