"""``TiledLinear``: a large linear layer in tiles, each of which is fetched, used and released alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TiledLinear"]


class TiledLinear(nn.Module):
    """``torch.nn.Linear`` as ``out_splits`` x ``in_splits`` smaller ones, whose weights are never there all at once.

    A tile is a unit of its own where zeropp wraps the model, if it is no smaller than ``unit_min_blocks`` asks for.
    Use as few as will do: each is a gather, and smaller products.

    Args:
        in_features, out_features, bias: as of ``torch.nn.Linear``.
        in_splits, out_splits: tiles along the input and the output; features that cannot be dealt out evenly go to the
            first of them.
        input_is_already_split: inputs are sequences of ``in_splits`` tensors.
        combine_out_splits: outputs are one tensor; else a list of ``out_splits``.
        linear_cls: makes a tile of (in_features, out_features, bias=..., **kwargs).
        init_linear: whose weights to begin with.
        **kwargs: of ``linear_cls``.

    Raises:
        RuntimeError: more tiles than features, or fewer than one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self._columns = _sizes(in_features, in_splits, "in")
        self._rows = _sizes(out_features, out_splits, "out")
        # Where each begins, and the last ends: what DeepSpeed's has by these names.
        self.in_parts, self.out_parts = ([0, *accumulate(sizes)] for sizes in (self._columns, self._rows))
        # The bias is added once: by the last tile of each row.
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and number == in_splits - 1, **kwargs)
                for number, columns in enumerate(self._columns)
            )
            for rows in self._rows
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """[..., in_features] to [..., out_features]; see ``input_is_already_split`` and ``combine_out_splits``.

        Raises:
            RuntimeError: the input comes in another number of parts.
        """
        if self.input_is_already_split:
            inputs: Sequence[Tensor] = list(input_)
        else:
            assert isinstance(input_, Tensor)
            # Views: a copy of the input would cost what tiles save.
            inputs = input_.split(self._columns, dim=-1)
        if len(inputs) != self.in_splits:
            raise RuntimeError(f"TiledLinear of {self.in_splits} in_splits was given {len(inputs)} inputs")
        outputs = []
        for row in self.linears:
            assert isinstance(row, nn.ModuleList)
            out = row[0](inputs[0])
            for tile, own in zip(row[1:], inputs[1:], strict=True):
                out = out + tile(own)
            outputs.append(out)
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take a linear layer's weights, before the model is wrapped.

        Raises:
            RuntimeError: it has another shape, or one has a bias and the other has not.
        """
        if tuple(other.weight.shape) != (self.out_features, self.in_features) or (other.bias is None) == self.use_bias:
            raise RuntimeError(
                f"{other} does not fit a TiledLinear of in_features={self.in_features}, "
                f"out_features={self.out_features}, bias={self.use_bias}"
            )
        bias = other.bias.split(self._rows) if other.bias is not None else ()
        for number, (row, weights) in enumerate(zip(self.linears, other.weight.split(self._rows), strict=True)):
            assert isinstance(row, nn.ModuleList)
            for tile, weight in zip(row, weights.split(self._columns, dim=1), strict=True):
                _tensor(tile, "weight").copy_(weight)
            if bias:
                _tensor(row[-1], "bias").copy_(bias[number])


def _tensor(tile: nn.Module, name: str) -> Tensor:
    found: Tensor = getattr(tile, name)
    return found


def _sizes(features: int, splits: int, which: str) -> list[int]:
    if not 1 <= splits <= features:
        raise RuntimeError(f"{which}_splits is {splits}; expected 1 to {features}, the {which}_features")
    # As DeepSpeed deals them out, so that tiles of its checkpoints have the same shapes.
    each, more = divmod(features, splits)
    return [each + (number < more) for number in range(splits)]
