"""A script that trains with transformers' ``Trainer``, with zeropp's deepspeed stand-in or with plain torch.

    python -m tests.support.trainer_job FOLDER KIND [KIND ...]

Several ranks use the stand-in; a single rank uses plain torch. Results go to ``FOLDER/<rank>.json``, or to
``FOLDER/plain.json`` on one rank. The script runs as a process of its own, because transformers looks for deepspeed
when it is imported.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
PLAIN = RANKS == 1
STEPS = 4

ZERO3: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            **dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(
            ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
        ),
        "stage3_gather_16bit_weights_on_model_save": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
    },
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
        "auto",
    ),
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}

_SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
_GROUPED = {**_SIZES, **_HEADS, "num_key_value_heads": 2}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_VIT = {**_SIZES, **_DRY, "num_attention_heads": 4, "image_size": 8, "patch_size": 4, "num_labels": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("LlamaForCausalLM", _GROUPED),
    "encoder": ("BertForMaskedLM", {**_SIZES, **_HEADS, **_DRY}),
    "encoder-decoder": ("T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
    "vision": ("ViTForImageClassification", _VIT),
    "experts": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


class Samples(Dataset):
    """The samples of one kind of model: ids of equal length, or images, the same every time.

    An epoch has five micro-batches of four samples. So the third of four steps has only one micro-batch in its window.
    """

    count = 20

    def __init__(self, kind: str) -> None:
        seed = torch.Generator().manual_seed(7)
        if kind == "vision":
            self.rows = [
                {"pixel_values": torch.randn(3, 8, 8, generator=seed), "labels": i % 5} for i in range(self.count)
            ]
        else:
            drawn = torch.randint(96, (self.count, 12), generator=seed)
            self.rows = [{"input_ids": row, "labels": row} for row in drawn]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


def saved(kind: str, folder: Path) -> str:
    """Return the folder of a model with random weights, which rank 0 writes."""
    path = folder / f"base-{kind}-{'plain' if PLAIN else 'ranks'}"
    if RANK == 0:
        name, settings = MODELS[kind]
        cls = getattr(transformers, name)
        torch.manual_seed(3)
        cls(cls.config_class(**settings)).save_pretrained(path)
    if not PLAIN:
        dist.barrier()
    return str(path)


def begin() -> None:
    """Reset Accelerate's state of the last run, and announce the ranks, which Accelerate does not detect on CPUs."""
    AcceleratorState._reset_state(True)
    if not PLAIN:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")


def arguments(folder: Path, name: str, config: dict[str, Any], **more: Any) -> TrainingArguments:
    """Return arguments: micro-batches of four samples over all ranks, two per step, and clipping at norm 0.5."""
    given: dict[str, Any] = {
        "max_steps": STEPS, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4 // RANKS,
        "per_device_eval_batch_size": 4 // RANKS, "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.0,
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "seed": 11, "dataloader_pin_memory": False,
        # Otherwise, losses of models that do not divide by tokens are multiplied by the number of ranks.
        "average_tokens_across_devices": False, **more,
    }  # fmt: skip
    if not PLAIN:
        given |= {"deepspeed": copy.deepcopy(config), "accelerator_config": {"use_configured_state": True}}
    return TrainingArguments(str(folder / f"{name}-{'plain' if PLAIN else 'ranks'}"), use_cpu=PLAIN, **given)


def made(model: Any, args: TrainingArguments, kind: str, trainer: type[Trainer] = Trainer, **more: Any) -> Trainer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if PLAIN:
        # The same as the JSON configures: no weight decay, and its schedule, which transformers does not offer by name.
        from zeropp.deepspeed.schedulers import WarmupDecayLR

        optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
        more["optimizers"] = (
            optimizer,
            WarmupDecayLR(optimizer, STEPS, warmup_max_lr=args.learning_rate, warmup_num_steps=2, warmup_type="linear"),
        )
    return trainer(model, args, train_dataset=Samples(kind), eval_dataset=Samples(kind), **more)


def told(trainer: Trainer) -> dict[str, list[float]]:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {key: [row[key] for row in rows] for key in ("loss", "grad_norm")}


class Stops(TrainerCallback):
    """A callback that ends a run after some steps, as a time limit of a job would."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= self.last
        return control


def trains(folder: Path, kind: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Train and evaluate a model, generate with a decoder, and save with ``save_model``; return the results."""
    begin()
    args = arguments(folder, kind, config, **more)
    base = saved(kind, folder)
    cls = getattr(transformers, MODELS[kind][0])
    trainer = made(cls.from_pretrained(base), args, kind)
    trainer.train()
    found: dict[str, Any] = {**told(trainer), "eval": trainer.evaluate()["eval_loss"]}
    if kind == "decoder":
        prompt = torch.arange(8).view(2, 4)
        # The weights are partitioned, so ``synced_gpus`` makes all ranks run equally many forwards.
        ids = trainer.model.generate(prompt, max_new_tokens=5, do_sample=False, synced_gpus=not PLAIN)
        found["generated"] = ids.tolist()
    trainer.save_model(str(Path(args.output_dir) / "final"))
    return found


def resumes(folder: Path, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Train a run that saves and stops half way and a run that resumes; return the losses of both."""
    cls = getattr(transformers, MODELS[kind][0])
    base = saved(kind, folder)
    found: dict[str, Any] = {}
    for part in ("first", "second"):
        begin()
        args = arguments(folder, f"{kind}-resumed", config, save_strategy="steps", save_steps=2)
        callbacks = [Stops(2)] if part == "first" else []
        trainer = made(cls.from_pretrained(base), args, kind, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=part == "second")
        found[part] = told(trainer)["loss"]
    return found


class Short(Trainer):
    """A Trainer that raises an out-of-memory error above four samples per micro-batch over all ranks."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._train_batch_size > 4 // RANKS:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(*args, **kwargs)


def shrinks(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Train with ``auto_find_batch_size`` from a batch that is too large; a second engine trains with a smaller one."""
    begin()
    model = transformers.LlamaForCausalLM.from_pretrained(saved("decoder", folder))
    args = arguments(folder, "short", config, auto_find_batch_size=True, per_device_train_batch_size=8 // RANKS)
    trainer = made(model, args, "decoder", Short)
    trainer.train()
    return {**told(trainer), "eval": trainer.evaluate()["eval_loss"]}


def goes_on(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Run three Trainers on one model: the first evaluates, and the other two train."""
    begin()
    args = [arguments(folder, f"again-{number}", config) for number in range(3)]
    model = transformers.LlamaForCausalLM.from_pretrained(saved("decoder", folder))
    first = made(model, args[0], "decoder")
    found: dict[str, Any] = {"before": first.evaluate()["eval_loss"], "loss": [], "grad_norm": []}
    # Release the engine, because an engine for evaluation has frozen the model.
    first.accelerator.free_memory()
    for each in args[1:]:
        begin()
        trainer = made(model, each, "decoder")
        trainer.train()
        found = {**found, **{key: found[key] + values[:2] for key, values in told(trainer).items()}}
    return {**found, "eval": trainer.evaluate()["eval_loss"]}


def adapts(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Train and save LoRA adapters on a decoder together with the decoder's head."""
    from peft import LoraConfig, get_peft_model

    begin()
    args = arguments(folder, "lora", config)
    model = transformers.LlamaForCausalLM.from_pretrained(saved("decoder", folder))
    torch.manual_seed(5)
    # For a module to save whole, peft calls the layer's state_dict() on the writing rank only.
    how = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    model = get_peft_model(model, LoraConfig(**how))
    trainer = made(model, args, "decoder")
    trainer.train()
    trainer.save_model(str(Path(args.output_dir) / "final"))
    return told(trainer)


def with_(config: dict[str, Any], **zero: Any) -> dict[str, Any]:
    return {**config, "zero_optimization": {**config["zero_optimization"], **zero}}


def run(folder: Path, kind: str) -> dict[str, Any]:
    """Run one kind: a key of :data:`MODELS`, "resume", "again", "lora" or "short".

    A colon and a setting may follow: "bf16", "1", "2" (the stage) or "cpu" (offload).
    """
    kind, _, how = kind.partition(":")
    config = {
        "": ZERO3, "bf16": ZERO3, "1": with_(ZERO3, stage=1), "2": with_(ZERO3, stage=2),
        "cpu": with_(ZERO3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
    }[how]  # fmt: skip
    if kind == "resume":
        return resumes(folder, "decoder", config)
    if kind == "again":
        return goes_on(folder, config)
    if kind == "lora":
        return adapts(folder, config)
    if kind == "short":
        return shrinks(folder / how, config)
    return trains(folder / (how or "."), kind, config, bf16=how == "bf16")


def main() -> None:
    folder, kinds = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    if not PLAIN:
        import deepspeed

        deepspeed.init_distributed("gloo")
    found = {kind: run(folder, kind) for kind in kinds}
    (folder / ("plain.json" if PLAIN else f"{RANK}.json")).write_text(json.dumps(found))
    if not PLAIN:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
