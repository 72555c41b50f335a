"""A small Llama trained by transformers' Trainer with a ZeRO-3 JSON for DeepSpeed; zeropp stands in for DeepSpeed.

    python -m zeropp.compat.deepspeed torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
    python -m zeropp.compat.deepspeed torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --resume

The model learns the text of this repository's licence, byte by byte. The script saves checkpoints, evaluates, generates
text with sharded weights, and saves a model that transformers can load without zeropp. The script itself does not
import zeropp: ``python -m zeropp.compat.deepspeed`` makes ``import deepspeed`` find zeropp's stand-in.
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
    """Return a batch whose labels are its input ids; the model itself shifts the labels by one position."""
    ids = torch.stack(windows)
    return {"input_ids": ids, "labels": ids}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama by transformers' Trainer.")
    parser.add_argument("--deepspeed", default=str(HERE / "zero3_auto.json"), help="DeepSpeed's JSON")
    parser.add_argument("--folder", default="runs/hf", help="folder for checkpoints and for the final model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true", help="continue from the folder's last checkpoint")
    return parser.parse_args(argv)


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    more = {}
    if not torch.cuda.is_available():
        # On CPUs, Accelerate ignores the ranks that torchrun started unless its PartialState exists before.
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
    # Create the arguments before the model: they enable sharded construction of models in transformers.
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
    # All ranks must call generate(), because each rank holds only shards of the weights.
    ids = trainer.model.generate(prompt, max_new_tokens=40, do_sample=False, synced_gpus=dist.is_initialized())
    trainer.save_model(str(Path(args.folder) / "final"))
    if trainer.is_world_process_zero():
        print(bytes(ids[0].tolist()).decode(errors="replace"))
        # Read with safetensors, because from_pretrained() would be a collective call as long as stage 3 is enabled, and
        # only rank 0 runs this block.
        saved = load_file(Path(args.folder) / "final" / "model.safetensors")
        print(f"saved {sum(value.numel() for value in saved.values()):,} parameters in {args.folder}/final")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
