"""The leaf module block: modules whose parameters are fetched as one."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from zeropp.config.base import Block


def _listed(value: object) -> object:
    # A string is a sequence, too, of its letters.
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]

# Sparse expert blocks run a different subset of their experts on each rank, so per-expert units would ask for
# collectives that other ranks do not join.
# By name, since transformers need not be there.
SPARSE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModuleConfig(Block):
    """Modules that are fetched and released whole: no unit boundary is put inside them. A single string is
    taken for a list of one."""

    classes: Names = SPARSE_BLOCKS
    """Classes whose every instance is a leaf, by class name or by full dotted name. Names that nothing in
    the model has are skipped."""

    names: Names = ()
    """Qualified names of single modules, as `model.named_modules()` spells them."""

    name_suffixes: Names = ()
    """Endings of qualified names: each module whose name ends with one of them is a leaf."""
