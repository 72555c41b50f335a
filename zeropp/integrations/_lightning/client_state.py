"""Lightning's values in a checkpoint, besides tensors of model and optimizer, as the client state.

Values that zeropp can write go as they are. Others, as classes and objects among hyperparameters, are pickled, and read
by torch's loader for weights alone unless the caller says otherwise.
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
"""Name of the checkpoint inside the folder that Lightning names; the one that its DeepSpeedStrategy uses."""

FOREIGN: dict[str, Any] = {"pytorch-lightning_version": "2.0.0", "epoch": 0, "global_step": 0, "lr_schedulers": []}
"""The least that a Trainer wants of a checkpoint, for folders of which tensors alone are read."""

_VALUES, _PICKLED = "lightning", "lightning_pickled"


def pack(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A client state of everything in Lightning's checkpoint."""
    values: dict[str, Any] = {}
    pickled: dict[str, Tensor] = {}
    for key, given in checkpoint.items():
        value = _without_modules(given) if key == "hyper_parameters" else given
        try:
            # Tried here, key by key: what one of them has inside must not decide for all.
            encode(value, key, {})
        except CheckpointError:
            memory = io.BytesIO()
            torch.save(value, memory)
            pickled[key] = torch.frombuffer(bytearray(memory.getvalue()), dtype=torch.uint8)
        else:
            values[key] = value
    return {_VALUES: values, _PICKLED: pickled}


def _without_modules(given: Any) -> Any:
    """Hyperparameters but for parts of the model itself, whose weights the checkpoint has anyway."""
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
    """The values that :func:`pack` was given.

    Args:
        state: the client state; that of another program has nothing.
        weights_only: False to run what pickles name, as objects of any class need.

    Raises:
        CheckpointError: a pickle names what is not known to be harmless.
    """
    found = dict(state.get(_VALUES, {}))
    for key, data in state.get(_PICKLED, {}).items():
        try:
            # Not False unless it is said: Lightning passes None where the user has said nothing.
            found[key] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=weights_only is not False)
        except Exception as error:
            raise CheckpointError(
                f"{key!r} of the checkpoint holds objects of classes that torch does not load unasked; name them by "
                "torch.serialization.add_safe_globals([...]) if you trust the file, see the error above"
            ) from error
    return found


def local_folder(path: Any) -> Path:
    """A path that Lightning was given, where zeropp can write.

    Raises:
        CheckpointError: it is a URL.
    """
    # As a path it would become a directory named "s3:" below this one.
    if "://" in str(path):
        raise CheckpointError(f"{str(path)!r} is a URL; give a directory that all ranks see, for their parts")
    return Path(path)


def require_folder(path: Path) -> None:
    """Make sure that there is a folder that ranks have saved.

    Raises:
        CheckpointError: it is a file, or nothing.
    """
    # Asked first: what is given most often by mistake is a file of another strategy.
    if path.is_file():
        raise CheckpointError(
            f"{str(path)!r} is a single file; give the strategy load_full_weights=True to load its weights, or the "
            "path of a folder that a Trainer saved with this strategy"
        )
    # Somebody may have named the tag's folder in it.
    if not path.is_dir() or not (path / "latest").is_file():
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint of a Trainer with this strategy: expected a folder with a file 'latest'"
        )
