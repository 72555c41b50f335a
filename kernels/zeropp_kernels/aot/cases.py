"""All configurations in which kernels can be launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..device import copy, delta, lossless, quantize, reduce
from ..device.tiles import tile_of
from ..wire import BLOCK, GROUPS, SECTION

__all__ = ["Case", "cases"]

# Element types of pointers that have only one. Pointers to bytes are aligned, which every operation checks.
_POINTERS = {
    "messages": "u8", "message": "u8", "sources": "u8", "state": "u8", "entries": "i64", "owners": "i32",
    "norms": "fp32", "flag": "i32", "starts": "i64", "device_scale": "fp32",
}  # fmt: skip
_STATS = ("norms", "flag")
_OPTIONAL = ("device_scale", *_STATS)
_SMALL = ("entries", "owners", *_OPTIONAL)
_DTYPES = {"fp32": triton.language.float32, "bf16": triton.language.bfloat16, "fp16": triton.language.float16}


@dataclass(frozen=True)
class Case:
    """A kernel in one configuration: constants, dtypes of the caller's tensors, and alignment.

    Attributes:
        kernel: the Triton kernel.
        constants: values of its constexpr parameters, and None for pointers that are not given.
        pointers: element types ("fp32", "bf16", "fp16") of the caller's tensors by parameter; "" is the tensors of a
            table.
        misaligned: names of pointers that are not at a multiple of 16 bytes.
        near: True if the caller's buffers are below 2 GiB.
    """

    kernel: Any
    constants: Mapping[str, object]
    pointers: Mapping[str, str]
    misaligned: tuple[str, ...] = ()
    # On AMD, Triton uses other instructions for buffers below 2 GiB.
    near: bool = True

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def settings(self) -> str:
        shown = [f"{key.lower()}={int(value)}" for key, value in self.constants.items() if isinstance(value, int)]
        shown += [f"no {key}" for key, value in self.constants.items() if value is None]
        odd = [f"{name} misaligned" for name in self.misaligned] + ["far"] * (not self.near)
        return " ".join([*dict.fromkeys(self.pointers.values()), *(text for text in shown if "tile" not in text), *odd])

    @property
    def even(self) -> bool:
        """True if all accesses to values can be wide: no tensor is misaligned, and EVEN is True where it exists."""
        return not self.misaligned and bool(self.constants.get("EVEN", True))

    def source(self, target: GPUTarget) -> ASTSource:
        """Return the source for triton.compile, with the signature and attributes that Triton's launcher computes."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int], object] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for parameter in self.kernel.params:
            name, place = parameter.name, (parameter.num,)
            if name in self.constants:
                signature[name], constants[place] = "constexpr", self.constants[name]
            # The launcher takes the integer's width from the annotation and specialises no integers, see launched.
            elif parameter.annotation_type:
                signature[name] = parameter.annotation_type
            else:
                signature[name] = "*" + (self.pointers.get(name) or _POINTERS[name])
                # The launcher would compute this from the pointer's address.
                if not parameter.do_not_specialize_on_alignment and name not in self.misaligned:
                    attributes[place] = [["tt.divisibility", 16]]
                # Tables and norms never exceed 2 GiB for a buffer that fits a GPU, so only other pointers have a far
                # variant.
                if target.backend == "hip" and (self.near or name in _SMALL):
                    attributes[place] = [*attributes.get(place, []), ["tt.pointer_range", 32]]
        return ASTSource(self.kernel, signature, constants, attributes)


def _product(**rows: Sequence[object]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*rows.values()):
        yield dict(zip(rows, values, strict=True))


_BOTH = (False, True)
_ENCODING = {"BITS": tuple(GROUPS), "ROTATE": _BOTH, "FEEDBACK": _BOTH}


def _left_out(names: Sequence[str] = _OPTIONAL) -> Iterator[dict[str, None]]:
    """Yield every subset of the optional pointers as constants: a pointer that is not given is the constant None."""
    for given in itertools.product(_BOTH, repeat=len(names)):
        yield {name: None for name, wanted in zip(names, given, strict=True) if not wanted}


def _case(kernel: Any, constants: Mapping[str, object], pointers: Mapping[str, str], numel: int) -> Case:
    """Return a case with the tile of the table, in pieces of ``numel`` elements."""
    return Case(kernel, {**constants, "TILE": tile_of(kernel, constants).holds(numel)}, pointers)


def _quantize() -> Iterator[Case]:
    for row in _product(dtype=tuple(_DTYPES), **_ENCODING):
        dtype, group = row.pop("dtype"), GROUPS[row["BITS"]]
        yield _case(quantize.quantize_kernel, row, {"x": dtype}, group)
        yield _case(quantize.quantize_tensors_kernel, {**row, "DTYPE": _DTYPES[dtype]}, {"": dtype}, group)
    for row in _product(SOURCE_BITS=tuple(GROUPS), **_ENCODING):
        row["SOURCE_K"] = GROUPS[row["SOURCE_BITS"]] // 128
        for scale in _left_out(("device_scale",)):
            yield _case(quantize.reduce_quantize_kernel, {**row, **scale}, {}, GROUPS[row["BITS"]])


def _reduce() -> Iterator[Case]:
    for row in _product(dtype=tuple(_DTYPES), BITS=tuple(GROUPS), ROTATE=_BOTH):
        dtype, group = row.pop("dtype"), GROUPS[row["BITS"]]
        yield _case(reduce.dequantize_kernel, row, {"out": dtype}, group)
        # 16-bit outputs cannot be accumulated or measured, see dispatch.
        for optional in _left_out():
            if dtype == "fp32" or optional.keys() >= set(_STATS):
                for accumulate in _BOTH if dtype == "fp32" else (False,):
                    constants = {**row, **optional, "ACCUMULATE": accumulate}
                    yield _case(reduce.reduce_kernel, constants, {"out": dtype}, group)
    for row in _product(dtype=tuple(_DTYPES), ACCUMULATE=_BOTH):
        pointers = {"messages": row.pop("dtype"), "out": "fp32"}
        for optional in _left_out():
            yield _case(reduce.sum_kernel, {**row, **optional}, pointers, BLOCK)


def _delta() -> Iterator[Case]:
    for row in _product(dtype=("bf16", "fp16"), UPDATE=_BOTH):
        pointers = {"reference": row.pop("dtype")}
        yield _case(delta.delta_encode_kernel, row, {"shard": "fp32", **pointers}, GROUPS[4])
        if row["UPDATE"]:
            yield _case(delta.delta_apply_kernel, {}, pointers, GROUPS[4])


def _lossless() -> Iterator[Case]:
    for even in _BOTH:
        row = {"EVEN": even}
        for dtype in ("fp32", "bf16"):
            pointers = {"values": dtype, "reference": "bf16"}
            yield _case(lossless.lossless_count_kernel, row, pointers, SECTION)
            yield _case(lossless.lossless_encode_kernel, row, pointers, SECTION)
        yield _case(lossless.lossless_decode_kernel, row, {"reference": "bf16", "out": "bf16"}, SECTION)


def _copy() -> Iterator[Case]:
    dtypes = tuple(_DTYPES)
    for row in _product(dtype=dtypes, flat=dtypes, optional=tuple(_left_out())):
        dtype, flat = row.pop("dtype"), row.pop("flat")
        row.update(row.pop("optional"), DTYPE=_DTYPES[dtype])
        pointers = {"": dtype, "flat": flat}
        for accumulate in _BOTH if flat == "fp32" else (False,):
            for kernel in (copy.gather_kernel, copy.gather_pinned_kernel):
                yield _case(kernel, {**row, "ACCUMULATE": accumulate}, pointers, BLOCK)
        yield _case(copy.scatter_kernel, row, pointers, BLOCK)
        yield _case(copy.scatter_pinned_kernel, row, pointers, BLOCK)


def _alignments(case: Case) -> Iterator[Case]:
    """Yield the case with each subset of the caller's tensors misaligned, among those with a known alignment."""
    names = [name for name in case.pointers if name in case.kernel.arg_names and name not in case.kernel.untold]
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            yield replace(case, misaligned=chosen)


def _covering(every: Sequence[Case], size: int) -> list[Case]:
    """Return cases that together have every combination of ``size`` settings of each kernel."""
    chosen: list[Case] = []
    for kernel in dict.fromkeys(case.kernel for case in every):
        own = [case for case in every if case.kernel is kernel]
        has = {id(case): _combinations(case, size) for case in own}
        left = set().union(*has.values())
        while left:
            # Greedy: take the case with the largest number of combinations that are still missing.
            best = max(own, key=lambda case: len(has[id(case)] & left))
            left -= has[id(best)]
            chosen.append(best)
    return chosen


def _combinations(case: Case, size: int) -> set[object]:
    items = [(key, str(value)) for key, value in (*case.constants.items(), *case.pointers.items())]
    items += [(f"{name} aligned", str(name not in case.misaligned)) for name in case.pointers]
    items += [(name, "given") for name in _OPTIONAL if name in case.kernel.arg_names and name not in case.constants]
    items.append(("even", str(case.even)))
    # A kernel with fewer than size settings still needs one case.
    return set(itertools.combinations(items, size)) or {()}


def cases(cover: str = "pairs") -> list[Case]:
    """Return the cases to compile.

    Args:
        cover: "one" case per kernel, "each" setting in a case, all "pairs" of settings, or "all" that can be launched.
    """
    found = [odd for case in (*_quantize(), *_reduce(), *_delta(), *_lossless(), *_copy()) for odd in _alignments(case)]
    return found if cover == "all" else _covering(found, {"one": 0, "each": 1, "pairs": 2}[cover])
