"""Conversion of a folder saved by zeropp's strategy to one file with full float32 weights."""

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
    """Write a single-file checkpoint that ``LightningModule.load_from_checkpoint`` loads. No process group is needed.

    The function has the name of Lightning's function for DeepSpeed's folders. From a folder that DeepSpeed saved, it
    only takes the weights.

    Args:
        checkpoint_dir: folder that a Trainer saved, such as ``x.ckpt``.
        output_file: file to write; an existing file is replaced.
        tag: name of the checkpoint in the folder; None for the newest.
        weights_only: False to load pickled hyperparameters of any class, from a trusted folder.

    Returns:
        The contents of the file: ``state_dict``, and Lightning's other values without optimizer states.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    root = Path(checkpoint_dir).absolute()
    if tag is None:
        require_folder(root)
        # Folders of other programs may hold several checkpoints; the file ``latest`` names the newest.
        tag = (root / "latest").read_text().strip()
    found: dict[str, Any] = dict(FOREIGN)
    folder = root / tag
    # Only zeropp's folders have METADATA. From DeepSpeed's folders no other values are read, because that would mean
    # loading pickles.
    if (folder / METADATA).is_file():
        source = TensorReader(folder, Metadata.read(folder), "all")
        extra = decode(source.metadata.values.get("extra", {}), source.tensor)
        found = unpack(extra.get("client_state", {}), weights_only)
    found["state_dict"] = get_fp32_state_dict_from_zero_checkpoint(root, tag)
    beside = Path(f"{os.fspath(output_file)}.writing")
    torch.save(found, beside)
    # Write to a second file and rename it: a file that is cut off by a crash would look complete.
    os.replace(beside, output_file)
    return found
