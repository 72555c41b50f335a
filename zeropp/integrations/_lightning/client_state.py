"""Conversion between Lightning's checkpoint dict, without weights and optimizer states, and zeropp's client state.

Values of types that zeropp's checkpoints support are stored as they are. Other values, such as classes and objects
among the hyperparameters, are pickled. They are loaded by ``torch.load`` with ``weights_only=True``, unless the caller
allows more.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.checkpoint import CheckpointError
from zeropp.checkpoint.metadata import encode
from zeropp.config.base import warn_user
from zeropp.params.guard import is_managed

__all__ = ["FOREIGN", "TAG", "local_folder", "pack", "require_folder", "unpack"]

TAG = "checkpoint"
"""Name of the checkpoint inside the folder that Lightning names; Lightning's DeepSpeedStrategy uses the same name."""

FOREIGN: dict[str, Any] = {"pytorch-lightning_version": "2.0.0", "epoch": 0, "global_step": 0, "lr_schedulers": []}
"""The minimum that a Trainer needs from a checkpoint, for folders that only have weights and optimizer states."""

_VALUES, _PICKLED = "lightning", "lightning_pickled"


def pack(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client state for all values of Lightning's checkpoint dict."""
    values: dict[str, Any] = {}
    pickled: dict[str, Tensor] = {}
    for key, given in checkpoint.items():
        value = _without_modules(given) if key == "hyper_parameters" else given
        try:
            # Try each key by itself, so that one unsupported value does not cause all values to be pickled.
            encode(value, key, {})
        except CheckpointError:
            memory = io.BytesIO()
            torch.save(value, memory)
            pickled[key] = torch.frombuffer(bytearray(memory.getvalue()), dtype=torch.uint8)
        else:
            values[key] = value
    return {_VALUES: values, _PICKLED: pickled}


def _without_modules(given: Any) -> Any:
    """Return the hyperparameters except modules of the model, whose weights the checkpoint already contains."""
    managed = [
        name
        for name, value in given.items()
        if isinstance(value, nn.Module) and any(is_managed(each) for each in value.parameters())
    ]
    if managed:
        warn_user(
            f"hyperparameters {managed} are modules of the model, and are not saved as hyperparameters: call "
            f"save_hyperparameters(ignore={managed}), and give them to load_from_checkpoint(..., {managed[0]}=...)"
        )
    return {name: value for name, value in given.items() if name not in managed}


def unpack(state: Mapping[str, Any], weights_only: bool | None = None) -> dict[str, Any]:
    """Return the values that were given to :func:`pack`.

    Args:
        state: client state of a checkpoint. A client state of another program gives an empty dict.
        weights_only: False to load pickled objects of any class, which may run code from the file.

    Raises:
        CheckpointError: a pickle contains a class that torch does not load with ``weights_only=True``.
    """
    found = dict(state.get(_VALUES, {}))
    for key, data in state.get(_PICKLED, {}).items():
        try:
            # Only False allows all classes: Lightning passes None if the user has not set weights_only.
            found[key] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=weights_only is not False)
        except Exception as error:
            raise CheckpointError(
                f"{key!r} of the checkpoint holds objects of classes that torch does not load unasked; name them by "
                "torch.serialization.add_safe_globals([...]) if you trust the file, see the error above"
            ) from error
    return found


def local_folder(path: Any) -> Path:
    """Return a path from Lightning as a local path.

    Raises:
        CheckpointError: the path is a URL.
    """
    # Used as a path, a URL would create a folder named "s3:" in the working directory.
    if "://" in str(path):
        raise CheckpointError(f"{str(path)!r} is a URL; give a directory that all ranks see, for their parts")
    return Path(path)


def require_folder(path: Path) -> None:
    """Raise unless the path is a folder that a strategy of zeropp or DeepSpeed has saved.

    Raises:
        CheckpointError: the path is a file, does not exist, or has no file ``latest``.
    """
    # A single file, saved by another strategy, is the most frequent mistake and gets its own message.
    if path.is_file():
        raise CheckpointError(
            f"{str(path)!r} is a single file; give the strategy load_full_weights=True to load its weights, or the "
            "path of a folder that a Trainer saved with this strategy"
        )
    # The file ``latest`` distinguishes the saved folder from the folder of the tag inside it.
    if not path.is_dir() or not (path / "latest").is_file():
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint of a Trainer with this strategy: expected a folder with a file 'latest'"
        )
