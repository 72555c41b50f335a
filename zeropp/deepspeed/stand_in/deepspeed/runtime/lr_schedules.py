"""Learning rate schedules, by the names that the JSON uses."""

from __future__ import annotations

import argparse

from zeropp.deepspeed.schedulers import SCHEDULERS, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
]

VALID_LR_SCHEDULES = list(SCHEDULERS)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule``, the name of a schedule. The schedule's own arguments are set in the JSON."""
    parser.add_argument("--lr_schedule", choices=VALID_LR_SCHEDULES, help="a schedule of learning rates")
    return parser
