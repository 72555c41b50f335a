"""The formats of files and folders of other programs, and their tensors as a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from zeropp._extensions import extensions
from zeropp.checkpoint.conversions import convert_source
from zeropp.checkpoint.dcp_folder import DCP_METADATA, find_dcp
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.foreign import safetensors_metadata
from zeropp.checkpoint.metadata import METADATA
from zeropp.checkpoint.named import metadata_of, named_source
from zeropp.checkpoint.names import model_names
from zeropp.checkpoint.source import Source
from zeropp.checkpoint.torch_state import TORCH_INDEX, TORCH_SINGLE, find_torch
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["foreign_source"]

_KNOWN = (
    "safetensors files (*.safetensors)",
    "files of torch.save (*.pt, *.pth, *.bin, also with pytorch_model.bin.index.json)",
    "a folder of torch.distributed.checkpoint (.metadata)",
)


def _known() -> str:
    return ", ".join([*_KNOWN, *(each for extension in extensions() for each in extension.checkpoint_formats)])


def foreign_source(
    place: Path,
    model: nn.Module,
    optimizer: ZeroOptimizer | None,
    strict: bool,
    prefix: str | None,
    safetensors: bool = False,
) -> Source:
    """The tensors of others' files, under the names of a checkpoint.

    Args:
        place: a file or a folder.
        model: whose tensors are wanted.
        optimizer: whose states are wanted, or None.
        strict: raise if they are not there.
        prefix: of the model's names there; see :func:`zeropp.checkpoint.load_foreign`.
        safetensors: take it for safetensors files, whatever else is there.

    Raises:
        CheckpointError: it is of no known format, damaged, or of a checkpoint of zeropp itself.
    """
    names, aliases = model_names(model)
    if safetensors:
        source = Source(*safetensors_metadata(place), "none")
    else:
        source = _source(place, names, optimizer, prefix)
    if source.locate is None:
        # What was saved file by file; jobs save their models' own names.
        source = convert_source(source, model, names.keys() | aliases.keys())
    if optimizer is not None and strict and "groups" not in source.metadata.values:
        raise CheckpointError(
            f"{str(place)!r} has no optimizer states that are known here; leave the optimizer out, or load with "
            "strict=False, which leaves its states as they are"
        )
    return source


def _source(place: Path, names: Mapping[str, Tensor], optimizer: ZeroOptimizer | None, prefix: str | None) -> Source:
    if not place.exists():
        raise CheckpointError(f"there is nothing at {str(place)!r}; expected {_known()}")
    if place.is_file() and place.suffix != ".safetensors":
        return named_source(find_torch(place), names, optimizer, prefix)
    if (place / METADATA).is_file():
        raise CheckpointError(f"{str(place)!r} is a checkpoint of zeropp; load it with zeropp.checkpoint.load")
    if (place / DCP_METADATA).is_file():
        return named_source(find_dcp(place), names, optimizer, prefix)
    keys = None if optimizer is None else frozenset(key for group in optimizer.param_groups for key in group)
    for extension in extensions():
        found = extension.read_checkpoint(place, keys)
        if found is not None:
            folder, files, named = found
            return Source(folder, metadata_of(files, named), "none")
    if place.is_file() or any(place.glob("*.safetensors")):
        return Source(*safetensors_metadata(place), "none")
    if (place / TORCH_INDEX).is_file() or (place / TORCH_SINGLE).is_file():
        return named_source(find_torch(place), names, optimizer, prefix)
    raise CheckpointError(
        f"{str(place)!r} is of no format that is known here: it has "
        f"{sorted(each.name for each in place.iterdir())[:5]}; expected {_known()}"
    )
