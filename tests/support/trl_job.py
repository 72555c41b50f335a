"""A script that trains with TRL's trainers: with zeropp's deepspeed stand-in on two ranks, or with plain torch on one.

    python -m tests.support.trl_job FOLDER

The script writes losses to ``FOLDER/<rank>.json``, or to ``FOLDER/plain.json`` on one rank. The script runs as a
process of its own because libraries must be imported after the stand-in is installed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

RANKS, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
PLAIN = RANKS == 1
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)


def arguments(cls: Any, folder: Path, **more: Any) -> Any:
    AcceleratorState._reset_state(True)
    given: dict[str, Any] = {
        "output_dir": str(folder / cls.__name__), "max_steps": 6, "per_device_train_batch_size": 8 // RANKS,
        "learning_rate": 1e-2, "weight_decay": 0.0, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "bf16": False, "average_tokens_across_devices": False, "seed": 3, **more,
    }  # fmt: skip
    if PLAIN:
        return cls(**given, use_cpu=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return cls(**given, deepspeed=json.loads(json.dumps(ZERO3)), accelerator_config={"use_configured_state": True})


def run(kind: str, folder: Path, base: str) -> list[float]:
    """Train with one trainer and return the logged losses.

    For GRPO the result is the logged rewards, because its samples differ between one process and two.
    """
    tokens = tokenizer()
    if kind == "sft":
        data = Dataset.from_dict({"text": [f"w{i % 60} w5 w{i % 7} w5 w6" for i in range(64)]})
        made = SFTTrainer(
            base, arguments(SFTConfig, folder, max_length=16), train_dataset=data, processing_class=tokens
        )
    elif kind == "dpo":
        pairs = {"prompt": [f"w{i % 60}" for i in range(64)], "chosen": [" w5 w5"] * 64, "rejected": [" w9 w9"] * 64}
        args = arguments(DPOConfig, folder, max_length=16)
        made = DPOTrainer(base, args=args, train_dataset=Dataset.from_dict(pairs), processing_class=tokens)
    else:
        args = arguments(GRPOConfig, folder, num_generations=4, max_completion_length=8, beta=0.01)
        data = Dataset.from_dict({"prompt": [f"w{i % 60} w{i * 7 % 60}" for i in range(64)]})
        reward = lambda completions, **_: [len(set(each.split())) / 8 for each in completions]  # noqa: E731
        made = GRPOTrainer(base, reward, args=args, train_dataset=data, processing_class=tokens)
    made.train()
    made.save_model(str(folder / f"{kind}-{'plain' if PLAIN else 'ranks'}"))
    return [row["reward" if kind == "grpo" else "loss"] for row in made.state.log_history if "loss" in row]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    base = str(folder / f"base-{'plain' if PLAIN else 'ranks'}")
    if not PLAIN:
        import deepspeed

        deepspeed.init_distributed("gloo")
    if RANK == 0:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(base)
    if not PLAIN:
        dist.barrier()
    found = {kind: run(kind, folder, base) for kind in ("sft", "dpo", "grpo")}
    (folder / ("plain.json" if PLAIN else f"{RANK}.json")).write_text(json.dumps(found))
    if not PLAIN:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
