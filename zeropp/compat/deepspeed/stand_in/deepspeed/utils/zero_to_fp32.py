"""Whole float32 weights from a checkpoint, zeropp's or DeepSpeed's, without processes; also as a command.

python -m deepspeed.utils.zero_to_fp32 runs/first weights --safe_serialization
"""

from __future__ import annotations

import argparse

from zeropp.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]


def main(argv: list[str] | None = None) -> None:
    """Convert, by DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.utils.zero_to_fp32", description=__doc__)
    parser.add_argument("checkpoint_dir", help="the folder that has latest")
    parser.add_argument("output_dir", help="where the weights go")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file; default: 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors in place of torch's files")
    parser.add_argument("-t", "--tag", help="of the checkpoint; default: the one that latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="trained ones alone")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; without effect")
    args = parser.parse_args(argv)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir, args.output_dir, max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization, tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )  # fmt: skip


if __name__ == "__main__":
    main()
