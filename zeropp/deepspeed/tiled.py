"""``TiledLinear``: a large linear layer divided into tiles that are gathered, used and freed one after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TiledLinear"]


class TiledLinear(nn.Module):
    """A ``torch.nn.Linear`` made of ``out_splits * in_splits`` smaller linear layers, called tiles.

    In a wrapped model each tile is a unit of its own, so the full weight is never gathered at once. A tile smaller than
    ``unit_min_blocks`` is joined with others into one unit. Use as few tiles as memory allows: each tile costs one
    gather and makes the matrix products smaller.

    Args:
        in_features, out_features, bias: arguments of ``torch.nn.Linear``.
        in_splits, out_splits: number of tiles along the input and along the output. If features cannot be divided
            evenly, the first tiles get one more.
        input_is_already_split: True if inputs are sequences of ``in_splits`` tensors.
        combine_out_splits: True to return one tensor; False to return a list of ``out_splits`` tensors.
        linear_cls: class of the tiles, called with (in_features, out_features, bias=..., **kwargs).
        init_linear: linear layer whose weights are copied; None to keep the initialization of ``linear_cls``.
        **kwargs: further arguments of ``linear_cls``.

    Raises:
        RuntimeError: there are more tiles than features, or fewer than 1, or ``init_linear`` does not fit.
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
        # DeepSpeed's attributes: the first feature of each tile, and the end of the last tile.
        self.in_parts, self.out_parts = ([0, *accumulate(sizes)] for sizes in (self._columns, self._rows))
        # Only the last tile of each row has a bias, so that the bias is added once to the sum over tiles.
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
        """Apply the linear layer.

        Args:
            input_: tensor [..., in_features]; with ``input_is_already_split`` a sequence of ``in_splits`` tensors,
                split along the last dimension.

        Returns:
            Tensor [..., out_features]; with ``combine_out_splits`` False a list of ``out_splits`` tensors, split along
            the last dimension.

        Raises:
            RuntimeError: the input sequence does not have ``in_splits`` tensors.
        """
        if self.input_is_already_split:
            inputs: Sequence[Tensor] = list(input_)
        else:
            assert isinstance(input_, Tensor)
            # split() makes views. A copy of the input would cost memory that the tiles are meant to save.
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
        """Copy the weights of a linear layer into the tiles. Call it before the model is wrapped.

        Args:
            other: linear layer of the same shape.

        Raises:
            RuntimeError: ``other`` has another shape, or only one of the two layers has a bias.
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
    """Return a tile's parameter, typed as a tensor."""
    found: Tensor = getattr(tile, name)
    return found


def _sizes(features: int, splits: int, which: str) -> list[int]:
    """Return the number of features of each tile.

    Args:
        features: number of features to divide.
        splits: number of tiles.
        which: "in" or "out", for the error.
    """
    if not 1 <= splits <= features:
        raise RuntimeError(f"{which}_splits is {splits}; expected 1 to {features}, the {which}_features")
    # Divide as DeepSpeed does, so that tiles have the shapes of the tiles in DeepSpeed's checkpoints.
    each, more = divmod(features, splits)
    return [each + (number < more) for number in range(splits)]
