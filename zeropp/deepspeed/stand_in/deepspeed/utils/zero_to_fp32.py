"""Whole float32 weights from a checkpoint of zeropp or DeepSpeed, without a process group; also as a command.

python -m deepspeed.utils.zero_to_fp32 runs/first weights --safe_serialization
"""

from zeropp.deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]


if __name__ == "__main__":
    main()
