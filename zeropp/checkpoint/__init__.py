"""Save and load checkpoints: directories that each rank writes and reads in part, for any number of ranks.

The package uses engines and optimizers, describes shards of tensors as boxes, and reads and writes files. Saving never
gathers weights; exporting whole weights does, through `zeropp.access`. Start with :mod:`~zeropp.checkpoint.boxes`,
which describes a rank's shards as boxes. Continue with `saving` and `load`.
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
