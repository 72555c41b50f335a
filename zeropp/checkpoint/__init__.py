"""Checkpoints: complete directories that load on any number of ranks, each of which reads and writes its own bytes.

Knows engines and optimizers, tensors as boxes, and files; not how weights are gathered, which saving never does.
Start with :mod:`~zeropp.checkpoint.boxes`, which makes boxes of a rank's tensors, then `saving` and `load`.
"""

from zeropp.checkpoint.boxes import CheckpointError
from zeropp.checkpoint.export import consolidate, export, save_16bit_model
from zeropp.checkpoint.load import Loaded, load, load_foreign, load_safetensors
from zeropp.checkpoint.reader import Reader
from zeropp.checkpoint.saving import save, wait
from zeropp.checkpoint.series import Series
from zeropp.checkpoint.stateful import state

__all__ = [
    "CheckpointError",
    "Loaded",
    "Reader",
    "Series",
    "consolidate",
    "export",
    "load",
    "load_foreign",
    "load_safetensors",
    "save",
    "save_16bit_model",
    "state",
    "wait",
]
