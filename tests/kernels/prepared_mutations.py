"""Checks of prepared launches with the event that each is there for."""

from __future__ import annotations

__all__ = ["MUTATIONS"]

PREPARED, DISPATCH = "device/prepared.py", "dispatch.py"
# The launch keeps what it calls, but not the compiled kernel.
_WITHOUT_KERNEL = """from types import SimpleNamespace
    made, after = done.compiled, done.after
    compiled = SimpleNamespace(run=made.run, function=made.function, packed_metadata=made.packed_metadata)
    del done, made
"""
MUTATIONS: list[tuple[str, str, str, str]] = [
    ("another driver", PREPARED, "driver.active is not active", "False"),
    ("another current device", PREPARED, "current_device() != device", "False"),
    ("another current stream", PREPARED, "run(*grid, current_stream(device),", "run(*grid, 7777,"),
    ("a knob of the runtime", PREPARED, "or runtime != runtime_before", ""),
    ("a knob of the compilation", PREPARED, "or compilation != compilation_before", ""),
    ("a hook before launches", PREPARED, "or enter.calls", ""),
    ("a hook after launches", PREPARED, "or leave.calls", ""),
    ("a hook of the kernel", PREPARED, "or hooks\n", "\n"),
    ("NaN as scale", PREPARED, "not abs(arguments[scale]) <= LARGEST", "abs(arguments[scale]) > LARGEST"),
    ("infinity as scale", PREPARED, "not abs(arguments[scale]) <= LARGEST", "arguments[scale] != arguments[scale]"),
    ("another scale", PREPARED, "passed[slot] = arguments[place]\n", "pass\n"),
    ("new addresses", PREPARED, "passed[slot] = address = arguments[place].data_ptr()", "address = 0"),
    ("a misaligned pointer", PREPARED, "        if bits:\n            return False\n", ""),
    ("a misaligned pointer that need not be aligned", PREPARED, "bits |= address & mask", "pass"),
    ("pageable memory", PREPARED, "if not tensor.is_pinned():", "if False:"),
    ("other sizes in the table", PREPARED, "if not fits(tensors, numels, offsets, room):", "if False:"),
    ("a tensor less", PREPARED, "if not fits(tensors, numels, offsets, room):", "if False:"),
    ("an end beyond the buffer", PREPARED, "numels, offsets, room)", "numels, offsets, 1 << 62)"),
    ("moved tensors", PREPARED, "if list(map(Tensor.data_ptr, tensors)) != addresses:", "if False:"),
    ("moved tensors in a graph", PREPARED, "locate(tensors, host, entries)", "pass"),
    ("new addresses of a count", PREPARED, "        if after is not None:", "        if False:"),
    ("no tensor is kept", PREPARED, "values[slot] = None", "pass"),
    ("the kernel is kept", PREPARED, "compiled, after = done.compiled, done.after\n", _WITHOUT_KERNEL),
    ("no compilation", PREPARED, "isinstance(done.compiled, CompiledKernel)\n        # A", "True\n        # A"),
    ("an AMD GPU", PREPARED, 'and done.compiled.metadata.target.backend == "cuda"', ""),
    ("a hook on the stages of the compiler", PREPARED, "and runtime.add_stages_inspection_hook is None", ""),
    ("a hook that is no chain", PREPARED, 'hasattr(hook, "calls") for hook', "True for hook"),
    ("a pointer that is computed", PREPARED, "all(slot in sources for", "all(True for"),
    ("a scale that is computed", PREPARED, "scale is None or any(each is scale for", "True or any(each is scale for"),
    ("a misaligned pointer at first", PREPARED, "if any(given[place].data_ptr() & mask for", "if any(False for"),
    ("a Triton that is not known", PREPARED, '".".join(triton.__version__.split(".")[:2]) in _VERSIONS', "True"),
    ("the interpreter", PREPARED, "return not INTERPRETED and", "return"),
    ("an argument given twice", DISPATCH, "apart = [_copy_of(each) for each in arguments]", "apart = list(arguments)"),
    ("an output that requires grad", DISPATCH, "            found.append(given)", "            pass"),
    ("outputs that require grad", DISPATCH, "            found += given", "            pass"),
    ("another dtype", DISPATCH, "(each.dtype, each.shape,", "(each.shape,"),
    ("another shape", DISPATCH, "each.shape, each.get_device()", "each.get_device()"),
    ("another shape with the same bytes", DISPATCH, "each.shape, each.get_device()", "each.numel(), each.get_device()"),
    ("another card", DISPATCH, "each.get_device(), each.is_contiguous()", "each.is_contiguous()"),
    ("gaps", DISPATCH, "each.get_device(), each.is_contiguous())", "each.get_device())"),
    ("another number", DISPATCH, "found = [arguments[place] for place in others]", "found: list[Any] = []"),
    ("another dtype of all tensors", DISPATCH, "_common(dtypes), _common(devices)", "_common(devices)"),
    ("another dtype of a tensor", DISPATCH, "_common(dtypes)", "dtypes[-1]"),
    ("another card of a tensor", DISPATCH, "_common(dtypes), _common(devices), whole", "_common(dtypes), whole"),
    ("a tensor in host memory", DISPATCH, "_common(devices)", "devices[-1]"),
    ("gaps in a tensor", DISPATCH, "(_common(dtypes), _common(devices), whole)", "(_common(dtypes), _common(devices))"),
]  # fmt: skip
