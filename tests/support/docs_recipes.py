"""The first Python block of a page of docs/, and a model for these blocks."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout

import torch
from torch import Tensor, nn

from tests.support.rank_pool import ROOT

__all__ = ["Blocks", "recipe", "run"]


def recipe(page: str, *changes: tuple[str, str]) -> str:
    """Return the first Python block of a page.

    Args:
        page: path of the page below docs/.
        changes: (old, new) pairs; each old text occurs once. Used where the page's own numbers would take too long.
    """
    found = re.search(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def run(text: str, space: dict[str, object]) -> str:
    """Execute the block in the namespace ``space`` and return the text that it prints."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(text, "docs", "exec"), space)
    return printed.getvalue()


class Blocks(nn.Module):
    """Three layers in an attribute named ``blocks``, the name that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x
