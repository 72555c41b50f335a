"""Functions that make ``import deepspeed`` find zeropp's stand-in, re-exported from zeropp.deepspeed.stand_in_path."""

from zeropp.deepspeed.stand_in_path import environment, install

__all__ = ["environment", "install"]
