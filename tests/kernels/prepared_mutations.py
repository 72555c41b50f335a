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
_ALIKE = ("if not each.alike(*tensors):", "if False:")
_PLAIN = ("if type(arguments[self._sized]) not in _PLAIN:", "if False:")
_TYPES = ("*[type(arguments[place]) for place in self._numbers],", "")
_NO_GUARDS = ("except TypeError:\n        return None", "except ArithmeticError:\n        pass")
_NO_KEY = ("except TypeError:\n            return False", "except ArithmeticError:\n            pass")
_NEXT_ONE = ("return True\n        return False\n", "return True\n            return False\n")
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
    ("an empty buffer", PREPARED, "if done is None or not _repeatable(", "if not _repeatable("),
    ("a misaligned pointer of a kernel that needs no alignment", PREPARED, " not in kernel.untold", " is not None"),
    ("a Triton that is not known", PREPARED, '".".join(triton.__version__.split(".")[:2]) in _VERSIONS', "True"),
    ("the interpreter", PREPARED, "return not INTERPRETED and", "return"),
    ("a number given twice", DISPATCH, "each * 1.0 if isinstance(each, float) else each", "each"),
    ("a tensor given twice", DISPATCH, "places = list(seen.values())", "places = list(range(len(tensors)))"),
    ("an output that requires grad", DISPATCH, *_ALIKE),
    ("outputs that require grad", DISPATCH, *_ALIKE),
    ("grad mode", DISPATCH, "(each.refused or (each", "(False or (each"),
    ("grad mode with a list", DISPATCH, "            tensors += arguments[place]", "            pass"),
    ("another dtype", DISPATCH, *_ALIKE),
    ("another shape", DISPATCH, *_ALIKE),
    ("another shape with the same bytes", DISPATCH, *_ALIKE),
    ("another card", DISPATCH, *_ALIKE),
    ("gaps", DISPATCH, *_ALIKE),
    ("another dtype of all tensors", DISPATCH, *_ALIKE),
    ("another dtype of a tensor", DISPATCH, *_ALIKE),
    ("another card of a tensor", DISPATCH, *_ALIKE),
    ("a tensor in host memory", DISPATCH, *_ALIKE),
    ("gaps in a tensor", DISPATCH, *_ALIKE),
    ("other tensors than one given twice", DISPATCH, "return same and check", "return check"),
    ("a tensor less", DISPATCH, "            len(tensors),\n", ""),
    ("another number", DISPATCH, "*[arguments[place] for place in self._fixed],", ""),
    ("a number of an equal value", DISPATCH, *_TYPES),
    ("a scale of another type", DISPATCH, *_TYPES),
    ("two tables in turn", DISPATCH, *_NEXT_ONE),
    ("two tables in turn", DISPATCH, "each.places != table or not each", "not each"),
    ("no outdated launch is kept", DISPATCH, " if each.places != table or not each.alike(*tensors)", ""),
    ("an input that requires grad, in grad mode", DISPATCH, " and not dispatched", ""),
    ("more kinds of calls than are kept", DISPATCH, "if len(self.found) >= _MOST_PREPARED:", "if False:"),
    ("more calls of a kind than are kept", DISPATCH, "[:_MOST_ALIKE]", ""),
    ("another optional argument", DISPATCH, "*[arguments[place] is None for place in self._optional],", ""),
    ("a torch without guards", DISPATCH, "if guards is None or not all(", "if not all("),
    ("guards that take other arguments", DISPATCH, *_NO_GUARDS),
    ("a dispatch mode", DISPATCH, *_ALIKE),
    ("vmap", DISPATCH, *_ALIKE),
    ("a function mode", DISPATCH, " or _function_modes()", ""),
    ("the profiler", DISPATCH, " or _profiler_enabled()", ""),
    ("a type with code of its own", DISPATCH, *_PLAIN),
    ("an input of a type with code of its own", DISPATCH, "not all(type(tensor) in _PLAIN for", "not all(True for"),
    ("no tensor", DISPATCH, *_PLAIN),
    ("an input that requires grad", DISPATCH, "(each.requires_grad and not dispatched)", "False"),
    ("torch.compile", DISPATCH, "torch.compiler.is_compiling() or not", "not"),
    ("a list in place of a number", DISPATCH, *_NO_KEY),
]  # fmt: skip
