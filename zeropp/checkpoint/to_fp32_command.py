"""Re-export of ``main`` for the conversion scripts that earlier versions wrote into checkpoint directories."""

from zeropp.deepspeed.zero_to_fp32 import main

__all__ = ["main"]
