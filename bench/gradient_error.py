"""Error of each parameter's gradient with zeropp.fsdp2, with one-dimensional parameters quantized or sent in 16 bits.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 -m bench.gradient_error --out bench/results/NAME

Small models with the shapes of Llama, Qwen3 (norms of queries and keys) and Qwen2 (biases) are trained with plain
FSDP2. Then gradients are computed from the same weights and batches, once without quantization and once with each
setting. The ranks pretend to be two nodes. The error of a parameter is ``|difference| / |gradient without
quantization|``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zeropp import fsdp2

SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS = {"Llama": {}, "Qwen3": {"head_dim": 32}, "Qwen2": {}}
SETTINGS: dict[str, dict[str, Any]] = {
    "8, 4 bits": {"gradient_bits": (8, 4)},
    "4 bits, one node": {"local_world_size": 4},
    "8, 8 bits": {"gradient_bits": (8, 8)},
    "8, 4 bits, hadamard": {"hadamard": True},
}
BATCHES = 3


def batch(step: int, rank: int) -> Tensor:
    """Return artificial text, word numbers [4, 64], in which each word predicts the next with probability 0.7."""
    draw = torch.Generator().manual_seed(7919 * step + rank)
    words = [torch.randint(SIZES["vocab_size"], (4,), generator=draw)]
    for _ in range(63):
        follows = (37 * words[-1] + 11) % SIZES["vocab_size"]
        other = torch.randint(SIZES["vocab_size"], (4,), generator=draw)
        words.append(torch.where(torch.rand(4, generator=draw) < 0.7, follows, other))
    return torch.stack(words, 1)


def trained(name: str, steps: int) -> Any:
    """Return a model of the named shape after some steps of AdamW under FSDP2."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS, **MODELS[name], tie_word_embeddings=False)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model.model.layers, model):
        fully_shard(block, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, steps - 1):
            print(f"{name}, step {step}: loss {loss:.3f}", flush=True)
    return model


def backward(model: Any, step: int) -> float:
    words = batch(step, dist.get_rank())
    loss = model(input_ids=words, labels=words, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def gradients(model: Any, step: int) -> dict[str, Tensor]:
    model.zero_grad()
    backward(model, step)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}


def kind(name: str) -> str:
    """Return a parameter's name without the number of its layer."""
    return re.sub(r"model\.(layers\.\d+\.)?", "", name)


def errors(model: Any, settings: dict[str, Any], plain: list[dict[str, Tensor]]) -> tuple[dict[str, list[float]], int]:
    """Return errors by kind of parameter, one per layer and batch, and rank 0's gradient bytes per step."""
    adapter = fsdp2.apply(model, weights=None, **{"local_world_size": 2, **settings})
    found: dict[str, list[float]] = defaultdict(list)
    for step, wanted in enumerate(plain):
        for name, value in gradients(model, 10_000 + step).items():
            found[kind(name)].append(float((value - wanted[name]).norm() / wanted[name].norm()))
    sent = sum(row.bytes for row in adapter.ledger.rows if row.kind == "reduce") // len(plain)
    adapter.remove()
    return found, sent


def measure(name: str, steps: int) -> dict[str, Any]:
    model = trained(name, steps)
    plain = [gradients(model, 10_000 + step) for step in range(BATCHES)]
    sizes = {parameter: value.numel() for parameter, value in plain[0].items()}
    vectors = sum(sizes[parameter] for parameter, value in plain[0].items() if value.ndim == 1)
    result: dict[str, Any] = {"share_of_vectors": vectors / sum(sizes.values()), "settings": {}}
    for said, settings in SETTINGS.items():
        for bits in (None, 16):
            found, sent = errors(model, {**settings, "vector_bits": bits}, plain)
            table = {each: [sorted(values)[len(values) // 2], max(values)] for each, values in found.items()}
            result["settings"].setdefault(said, {})[str(bits)] = {"errors": table, "bytes": sent}
    return result


def write(results: dict[str, Any], steps: int) -> str:
    lines = [
        "# Error of each parameter's gradient behind zeropp.fsdp2",
        "",
        f"torch {torch.__version__}, 4 CPU ranks as two nodes of two, one thread each; models of "
        f"{SIZES['hidden_size']} x {SIZES['num_hidden_layers']} layers, bf16 with float32 reductions, after {steps} "
        f"steps of AdamW. Error: |difference| / |gradient without codes|, median / largest over layers and {BATCHES} "
        "batches. Weights travel as they are. `codes`: `vector_bits=None`; `values`: `vector_bits=16`, the default. "
        "Bold: parameters of one dimension. Command: `torchrun --nproc-per-node 4 -m bench.gradient_error`.",
    ]
    for name, result in results.items():
        said = list(result["settings"])
        lines += ["", f"## {name}: {result['share_of_vectors']:.2%} of the elements in one dimension", ""]
        lines += ["| parameter | " + " | ".join(f"{each}: codes | values" for each in said) + " |"]
        lines += ["|" + " --- |" * (1 + 2 * len(said))]
        for each in result["settings"][said[0]]["None"]["errors"]:
            cells = [
                "{:.1%} / {:.1%}".format(*result["settings"][setting][bits]["errors"][each])
                for setting in said
                for bits in ("None", "16")
            ]
            vector = each.endswith(("norm.weight", ".bias"))
            lines.append(f"| {f'**{each}**' if vector else each} | " + " | ".join(cells) + " |")
        sent = [f"{result['settings'][setting][bits]['bytes']:,}" for setting in said for bits in ("None", "16")]
        lines.append("| bytes a step | " + " | ".join(sent) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="training steps before the measurement")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, help="path of the report without its suffix")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    results = {name: measure(name, arguments.steps) for name in arguments.models.split(",")}
    if dist.get_rank() == 0:
        text = write(results, arguments.steps)
        print(text)
        if arguments.out is not None:
            arguments.out.with_suffix(".md").write_text(text)
            arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
