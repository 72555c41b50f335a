"""zeropp.fsdp2 sends gradients of one-dimensional parameters as values of 16 bits or more beside quantized gradients.

Unless a test says otherwise, the job has two nodes of two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.support.fsdp2_models import DTYPES, gradients, hooks
from tests.support.rank_pool import run_ranks
from zeropp import fsdp2
from zeropp.fsdp2.shards import parameter_groups

WIDTH = 2.0**-7  # largest relative error of a sum of values that bfloat16 rounds on each of two hops


class Attention(nn.Module):
    """Norms and biases between matrices, as in Qwen2 and Qwen3; some have tiny gradients, some huge ones.

    ``mix`` and ``gain`` are vectors with additional dimensions of size 1, as in RWKV and vision transformers.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up = nn.Linear(40, 72)
        self.quiet = nn.LayerNorm(72)
        self.down = nn.Linear(72, 40)
        self.loud = nn.LayerNorm(40)
        self.spare = nn.Linear(40, 40)
        self.mix, self.gain = nn.Parameter(torch.full((1, 1, 40), 1e-2)), nn.Parameter(torch.full((40, 1), 1e-2))

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        y = self.up(x) + 1e-2 * self.quiet(x.repeat(1, 2)[:, :72])
        y = self.down(y) + 30 * self.loud(x) + (self.mix * self.gain.T).view(40) * x
        return x + y + self.spare(x) if spare else x + y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(40)

    def forward(self, x: Tensor, *args: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, *args)
        return (self.norm(x) * torch.linspace(-1, 2, 40, dtype=x.dtype)).sum(-1).square().mean()


def stack(dtype: str = "fp32", reduce: str = "fp32") -> Any:
    """Return a :class:`Stack` sharded with FSDP2, with compute dtype ``dtype`` and reduce dtype ``reduce``."""
    model: Any = Stack()
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=DTYPES[reduce])
    # The norm is a unit of its own, which has only vectors.
    for part in (*model.blocks, model.norm, model):
        fully_shard(part, mp_policy=policy)
    return model


def is_vector(value: Tensor) -> bool:
    """Return True if at most one dimension has a size other than 1."""
    return max(value.shape) == value.numel()


def batch(step: int = 0) -> Tensor:
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def of_one_step(settings: dict[str, Any] | None, *dtypes: str) -> tuple[dict[str, Tensor], set[str]]:
    """Return the gradients of one step, and the codecs that carried them.

    Args:
        settings: arguments of ``fsdp2.apply``; None for unchanged FSDP2.
        *dtypes: compute dtype and reduce dtype.
    """
    model = stack(*dtypes)
    adapter = None if settings is None else fsdp2.apply(model, weights=None, **settings)
    model(batch()).backward()
    rows = [] if adapter is None else adapter.ledger.rows
    return gradients(model), {row.codec for row in rows if row.kind == "reduce"}


def compared(settings: dict[str, Any], *dtypes: str) -> tuple[float, float, set[str]]:
    """Compare one step's gradients with those of unchanged FSDP2.

    Args:
        settings: arguments of ``fsdp2.apply``.
        *dtypes: compute dtype and reduce dtype.

    Returns:
        Largest relative error of a vector, largest relative error of a matrix, and the codecs of the reductions.
    """
    wanted, _ = of_one_step(None, *dtypes)
    found, codecs = of_one_step(settings, *dtypes)
    assert found.keys() == wanted.keys()
    errors = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    assert all(bool(value.isfinite().all()) for value in found.values())
    vectors, matrices = ([errors[name] for name in errors if is_vector(wanted[name]) == one] for one in (True, False))
    return max(vectors), max(matrices), codecs


SETTINGS = {
    "8, 4": ({}, {"int8+fp32", "int4+bf16", "bf16"}),
    "8, 8": ({"gradient_bits": (8, 8)}, {"int8+bf16", "bf16"}),
    "4, 4": ({"gradient_bits": (4, 4)}, {"int4+bf16", "bf16"}),
    "4, 8": ({"gradient_bits": [4, 8]}, {"int4+bf16", "int8+fp32", "bf16"}),
    "16, 4": ({"gradient_bits": (16, 4)}, {"int4+bf16", "bf16"}),
    "8, 32": ({"gradient_bits": (8, 32)}, {"int8+bf16", "fp32", "bf16"}),
    "rotated": ({"hadamard": True}, {"hadamard(int8)+fp32", "hadamard(int4)+bf16", "bf16"}),
    "fed back": (
        {"feedback": "both"}, {"feedback(int8+fp32)", "feedback(int4+bf16)", "bf16"},
    ),
    "one hop": ({"local_world_size": 4}, {"int4+bf16", "bf16"}),
    "one rank a node": ({"local_world_size": 1, "gradient_bits": (4, 8)}, {"int8+bf16", "bf16"}),
}  # fmt: skip


@pytest.mark.every(12)
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp16")], ids=str)
@pytest.mark.parametrize("name", list(SETTINGS))
def test_vectors_are_those_of_fsdp2_to_16_bits(name: str, dtypes: tuple[str, str]) -> None:
    """Vectors are rounded to bfloat16 at most once per hop, and matrices are still quantized."""
    settings, wanted = SETTINGS[name]
    if dtypes[1] != "fp32" and name == "8, 32":
        pytest.skip("32 bits are float32 whatever FSDP2 reduces in")
    # With a reduce dtype of 16 bits, the gradients of FSDP2 that the test compares with are rounded to 16 bits, too.
    rounding = 2 * WIDTH if dtypes[1] == "fp32" else 4 * WIDTH
    for vectors, matrices, codecs in run_ranks(4, compared, settings, *dtypes, local_world_size=2):
        assert vectors < rounding and matrices > 1e-4, (vectors, matrices)
        assert codecs == wanted


def test_without_them_vectors_share_scales() -> None:
    """With ``vector_bits=None``, a vector is quantized with a matrix's scale and loses most of its gradient."""
    for vectors, _, codecs in run_ranks(4, compared, {"vector_bits": None}, "fp32", "fp32", local_world_size=2):
        assert vectors > 0.5 and codecs == {"int8", "int4"}


def matrices_beside_loud_vectors() -> list[float]:
    """Return the largest relative error of a matrix with vectors as codes, and with vectors as values."""
    wanted, _ = of_one_step(None)
    found = []
    for bits in (None, 16):
        values, _ = of_one_step({"gradient_bits": (4, 4), "vector_bits": bits})
        matrices = [name for name in wanted if wanted[name].ndim > 1]
        found.append(max(float((values[n] - wanted[n]).norm() / wanted[n].norm()) for n in matrices))
    return found


@pytest.mark.campaign
def test_matrices_do_not_share_scales_with_vectors() -> None:
    """A vector with huge gradients would raise the scale of the matrix elements in its groups."""
    for codes, values in run_ranks(4, matrices_beside_loud_vectors, local_world_size=2):
        assert values < 0.3 and values < codes


class Chosen(nn.Module):
    """Experts with biases, of which each step uses another set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(7))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for at, expert in enumerate(self.experts):
            if (step + 1) >> at & 1:
                x = expert(x)
        return x.square().mean()


def many_sets() -> tuple[int, float]:
    """Train with 70 different sets of used parameters.

    Returns:
        Number of cached packings, and the largest relative error of a bias in the last step.
    """
    found = []
    for coded in (False, True):
        model: Any = fully_shard(Chosen())
        if coded:
            fsdp2.apply(model, weights=None)
        for step in range(70):
            model.zero_grad()
            model(batch(), step).backward()
        found.append({name: value for name, value in gradients(model).items() if value.ndim == 1})
    errors = [float((found[1][name] - value).norm() / value.norm()) for name, value in found[0].items()]
    return len(hooks(model)[1]._prepared), max(errors)


@pytest.mark.campaign
def test_packings_of_many_sets_of_parameters_are_not_all_kept() -> None:
    """The cache is cleared at 64 packings, so that its memory is bounded."""
    for kept, error in run_ranks(4, many_sets, local_world_size=2):
        assert kept <= 64 and error < 2 * WIDTH


def with_parts_missing(how: str) -> dict[str, float]:
    """Train three steps in which FSDP2's gradient buffer has varying contents.

    Args:
        how: "unused" or "unused as zeros" for parameters without a gradient, "frozen" for parameters that are frozen in
            some steps, "accumulated" for one reduction after three micro-batches.

    Returns:
        Relative error of each vector's gradient, by step and name.
    """
    found = []
    for settings in (None, {}):
        model = stack()
        if settings is not None:
            fsdp2.apply(model, weights=None)
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for step in range(3):
            if how == "unused as zeros":
                for module in modules:
                    module.set_reduce_scatter_unused_params(True)
            if how == "frozen":
                for block in model.blocks:
                    block.up.bias.requires_grad_(step == 1)
                    block.quiet.requires_grad_(step != 1)
            if how == "accumulated":
                model.set_requires_gradient_sync(step == 2)
            model(batch(step), how not in ("unused", "unused as zeros") or step == 1).backward()
            if how != "accumulated":
                # Compare each step's gradients alone, so that each set of parameters is checked.
                last = gradients(model)
                found.append({f"{step} {name}": value for name, value in last.items()})
                model.zero_grad()
        if how == "accumulated":
            found.append(gradients(model))
    half = len(found) // 2
    wanted, given = ({k: v for each in part for k, v in each.items()} for part in (found[:half], found[half:]))
    assert wanted.keys() == given.keys()
    zero = [name for name, value in wanted.items() if not value.any()]
    assert all(not given[name].any() for name in zero)
    return {
        name: float((given[name] - value).norm() / value.norm())
        for name, value in wanted.items()
        if value.ndim == 1 and name not in zero
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("how", ["unused", "unused as zeros", "frozen", "accumulated"])
def test_vectors_are_found_whichever_parameters_have_a_gradient(how: str) -> None:
    """FSDP2 omits parameters without a gradient, so the positions of vectors in its buffer vary."""
    for errors in run_ranks(4, with_parts_missing, how, local_world_size=2):
        # Gradients of several batches partly cancel in the sum over ranks, and rounding errors do not, so the relative
        # error is larger.
        assert errors and max(errors.values()) < (0.1 if how == "accumulated" else 2 * WIDTH), errors


def not_finite(value: float) -> tuple[list[str], list[str]]:
    """Multiply the output of a norm on rank 3 by Inf or NaN in the first of two steps, with error feedback.

    Returns:
        Parameters with gradients that are not finite, in the first step and in the second.
    """
    model = stack()
    fsdp2.apply(model, weights=None, feedback="both")
    x = batch()
    if dist.get_rank() == 3:
        handle = model.blocks[1].loud.register_forward_hook(lambda m, args, out: out * value)
    model(x).backward()
    found = [name for name, p in model.named_parameters() if not p.grad.full_tensor().isfinite().all()]
    model.zero_grad()
    if dist.get_rank() == 3:
        handle.remove()
    model(x).backward()
    later = [name for name, p in model.named_parameters() if not p.grad.full_tensor().isfinite().all()]
    return found, later


@pytest.mark.every(2)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_vectors_that_are_not_finite_arrive_and_are_not_carried_over(value: float) -> None:
    for found, later in run_ranks(4, not_finite, value, local_world_size=2):
        assert "blocks.1.loud.weight" in found and later == []


def bytes_sent() -> tuple[int, int, int, int]:
    """Run one step with vectors as codes, and one with vectors as values.

    Returns:
        Bytes of gradients with codes, bytes with values, number of elements of all vectors, and number of additional
        collectives with values.
    """
    sent, calls = [], []
    for bits in (None, 16):
        model = stack()
        adapter = fsdp2.apply(model, weights=None, vector_bits=bits)
        model(batch()).backward()
        rows = [row for row in adapter.ledger.rows if row.kind == "reduce"]
        sent.append(sum(row.bytes for row in rows))
        calls.append(sum(row.calls for row in rows))
    vectors = sum(p.numel() for p in model.parameters() if is_vector(p))
    return *sent, vectors, calls[1] - calls[0]


def test_values_go_in_the_same_messages() -> None:
    """Plain values need no collectives of their own, and add few bytes."""
    for codes, values, vectors, calls in run_ranks(4, bytes_sent, local_world_size=2):
        # A value has 4 bytes on the intra-node hop and 2 bytes on the inter-node hop. A rank sends half and a quarter
        # of the elements, 2.5 bytes per element of a vector. The last term bounds the padding to blocks of 256.
        assert calls == 0 and codes < values < codes + 3 * vectors + 2 * 4 * 3 * 256


def unwatched() -> list[bool]:
    """Return, for each of four settings, True if FSDP2's ``post_backward`` is replaced."""
    found = []
    for settings in ({}, {"vector_bits": None}, {"gradient_bits": None}, {"vector_bits": None, "feedback": "cross"}):
        model = stack()
        adapter = fsdp2.apply(model, **settings)
        group = parameter_groups(model.blocks[0]._get_fsdp_state())[0]
        found.append("post_backward" in vars(group))
        adapter.remove()
        assert "post_backward" not in vars(group) and type(hooks(model.blocks[0])[1]).__name__ == "DefaultReduceScatter"
    return found


def test_fsdp2_is_watched_only_where_parts_matter() -> None:
    """The replaced method runs for each unit in every backward, so zeropp replaces it only if needed.

    It is needed to find vectors in the buffer, and for error feedback.
    """
    assert run_ranks(4, unwatched, local_world_size=2) == [[True, False, False, True]] * 4
