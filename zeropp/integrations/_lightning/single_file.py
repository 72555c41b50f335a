"""One file of whole float32 weights, made of the folder that a Trainer with zeropp's strategy saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from zeropp.checkpoint.metadata import METADATA, Metadata, decode
from zeropp.checkpoint.tensor_reader import TensorReader
from zeropp.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zeropp.integrations._lightning.client_state import FOREIGN, require_folder, unpack

__all__ = ["convert_zero_checkpoint_to_fp32_state_dict"]


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_file: str | os.PathLike[str],
    tag: str | None = None,
    *,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Write a checkpoint of Lightning's own format: ``LightningModule.load_from_checkpoint`` takes it. No ranks needed.

    Lightning's name for it, over folders of zeropp; of a folder that DeepSpeed saved the weights alone are taken.

    Args:
        checkpoint_dir: what a Trainer saved, ``x.ckpt``.
        output_file: to write; replaced if it is there.
        tag: name of the checkpoint in the folder; None for the newest.
        weights_only: False if hyperparameters hold objects, and the folder is trusted.

    Returns:
        What the file has: ``state_dict``, and what Lightning keeps besides optimizers.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    root = Path(checkpoint_dir).absolute()
    if tag is None:
        require_folder(root)
        # The name is in a file, since other programs' folders have several checkpoints.
        tag = (root / "latest").read_text().strip()
    found: dict[str, Any] = dict(FOREIGN)
    folder = root / tag
    # Of DeepSpeed's, whose files would have to be unpickled, no more than tensors are read.
    if (folder / METADATA).is_file():
        source = TensorReader(folder, Metadata.read(folder), "all")
        extra = decode(source.metadata.values.get("extra", {}), source.tensor)
        found = unpack(extra.get("client_state", {}), weights_only)
    found["state_dict"] = get_fp32_state_dict_from_zero_checkpoint(root, tag)
    beside = Path(f"{os.fspath(output_file)}.writing")
    torch.save(found, beside)
    # At once: a file that was cut off would look like a whole one.
    os.replace(beside, output_file)
    return found
