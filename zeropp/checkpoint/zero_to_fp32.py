"""DeepSpeed's ``zero_to_fp32`` functions and command, re-exported from ``zeropp.deepspeed.zero_to_fp32``.

``python -m zeropp.checkpoint.zero_to_fp32`` runs the command. The scripts that are saved beside checkpoints import it.
"""

from __future__ import annotations

from zeropp.deepspeed.zero_to_fp32 import (
    LazyTensor,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

if __name__ == "__main__":
    main()
