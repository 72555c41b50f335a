"""The parts of DeepSpeed's API that act in models which plain zeropp calls build or wrap; see `zeropp._extensions`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zeropp._extensions import Extension
from zeropp.deepspeed.attributes import ZeroParamStatus, add_to_model, add_to_piece, remove

__all__ = ["EXTENSION"]


class _DeepSpeed(Extension):
    def __init__(self) -> None:
        # A property takes precedence over the value in a parameter's own dict, which holds while it is not released.
        self.released = {"ds_status": property(lambda parameter: ZeroParamStatus.NOT_AVAILABLE)}
        self.checkpoint_formats = ("a folder of DeepSpeed (latest, or *_optim_states.pt)",)

    def model_wrapped(self, model: nn.Module, engine: Any) -> None:
        add_to_model(model, engine)

    def piece_changed(self, parameter: nn.Parameter, piece: Any) -> None:
        add_to_piece(parameter, piece)

    def parameter_freed(self, parameter: nn.Parameter) -> None:
        remove(parameter)

    def read_checkpoint(self, path: Path, group_keys: frozenset[str] | None) -> tuple[Path, Any, Any] | None:
        # Imported here: a program that trains reads no checkpoints of DeepSpeed, most often.
        from zeropp.deepspeed.zero_checkpoints import ZeroFolder, zero_folder

        folder = zero_folder(path)
        if folder is None:
            return None
        found = ZeroFolder(folder)
        if group_keys is not None:
            found.add_optimizer(group_keys)
        return folder, found.files, found.named


EXTENSION = _DeepSpeed()
