"""The stand-in for the ``deepspeed`` package, by its old import path; see :mod:`zeropp.deepspeed.stand_in_path`."""

from zeropp.deepspeed.stand_in_path import environment, install

__all__ = ["environment", "install"]
