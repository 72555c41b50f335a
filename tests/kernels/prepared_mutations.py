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
    ("other sizes in the table", PREPARED, "if rows[1:] != [table.numels, table.offsets]:", "if False:"),
    ("an end beyond the buffer", PREPARED, "if rows[1:] != [table.numels, table.offsets]:", "if False:"),
    ("moved tensors", PREPARED, "locate(tensors, host, arguments[table.entries])", "pass"),
    ("moved tensors in a graph", PREPARED, "locate(tensors, host, arguments[table.entries])", "pass"),
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
    ("a number given twice", DISPATCH, "each * 1.0 if isinstance(each, float) else each", "each"),
    ("a tensor given twice", DISPATCH, "places = list(seen.values())", "places = list(range(len(tensors)))"),
    ("an output that requires grad", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("outputs that require grad", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("grad mode", DISPATCH, "if each.requires_grad and torch.is_grad_enabled():", "if False:"),
    ("grad mode with a list", DISPATCH, "            tensors += arguments[place]", "            pass"),
    ("another dtype", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("another shape", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("another shape with the same bytes", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("another card", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("gaps", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("another dtype of all tensors", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("another dtype of a tensor", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("another card of a tensor", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("a tensor in host memory", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("gaps in a tensor", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("other tensors than one given twice", DISPATCH, "return same and check", "return check"),
    ("a tensor less", DISPATCH, "            len(tensors),\n", ""),
    ("another number", DISPATCH, "            self._others(arguments),\n", ""),
    ("another optional argument", DISPATCH, "*[arguments[place] is None for place in self._optional],", ""),
    ("a torch without guards", DISPATCH, "if guards is None or not all(", "if not all("),
    ("guards that take other arguments", DISPATCH, "except TypeError:", "except ZeroDivisionError:"),
    ("a dispatch mode", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("vmap", DISPATCH, "if each.alike(*tensors):", "if True:"),
    ("a function mode", DISPATCH, " and not _function_modes():", ":"),
    ("the profiler", DISPATCH, "and not _profiler_enabled() and", "and"),
    ("a type with code of its own", DISPATCH, "type(tensor) in (Tensor, torch.nn.Parameter)", "True"),
    ("an input that requires grad", DISPATCH, "if each.requires_grad and torch.is_grad_enabled():", "if False:"),
    ("torch.compile", DISPATCH, "if not torch.compiler.is_compiling() and found and", "if found and"),
    ("a number of another type", DISPATCH, "except (AttributeError, TypeError):", "except ZeroDivisionError:"),
]  # fmt: skip
