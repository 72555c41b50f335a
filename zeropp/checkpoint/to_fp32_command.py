"""The import path of ``main`` in the scripts that older versions left beside checkpoints."""

from zeropp.deepspeed.zero_to_fp32 import main

__all__ = ["main"]
