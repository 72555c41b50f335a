"""All uses of private or renamed functions of PyTorch, except those of FSDP2, which are in fsdp2/shards.py.

Other files use some private names directly: attributes of PyTorch's modules, parameters and optimizers
(``_parameters``, ``_version``, ``_optimizer_step_pre_hooks``) and functions on lists of tensors (``torch._foreach_*``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._guards import CompileContext
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

__all__ = [
    "all_gather_single",
    "backends",
    "break_graph",
    "chosen_timeout",
    "compiles_backwards",
    "current_graph_task",
    "default_store",
    "fused_adagrad",
    "fused_adam",
    "fused_adamw",
    "fused_sgd",
    "goes_on",
    "group_timeout",
    "has_step_post_hooks",
    "is_aliased",
    "is_compiled",
    "is_dtensor",
    "is_registered",
    "leaves_out",
    "loss_scale",
    "makes_graph",
    "new_group",
    "one_intra_op_thread",
    "profiler_enabled",
    "put_hook_back",
    "put_hook_last",
    "queue_end_of_backward",
    "reduce_scatter_single",
    "replays_cuda_graphs",
    "sends_from_host",
    "set_grad_enabled",
    "set_hook_aside",
    "set_versions",
    "sharing_versions",
    "storage_id",
    "storage_uses",
    "uncompiled",
    "unguarded",
    "will_execute",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# This disables __torch_function__ of tensor subclasses only. Torch function modes stay active, such as GraphTracker,
# which records results computed from gathered values.
unguarded = torch._C.DisableTorchFunctionSubclass
"""Context manager inside which sharded parameters behave as plain tensors, without their guard."""

profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Function that returns True while the PyTorch profiler records."""


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Function that sets this thread's grad mode; ``torch.set_grad_enabled`` makes a context manager for each call."""


def set_hook_aside(parameter: nn.Parameter, handle: RemovableHandle) -> Callable[..., None]:
    """Remove and return a post-accumulate-grad hook, for :func:`put_hook_back`."""
    hooks: dict[int, Callable[..., None]] = parameter._post_accumulate_grad_hooks
    return hooks.pop(handle.id)


def put_hook_back(parameter: nn.Parameter, handle: RemovableHandle, hook: Callable[..., None]) -> None:
    """Put a hook back behind all other hooks of a parameter, which run in this order."""
    parameter._post_accumulate_grad_hooks[handle.id] = hook


def put_hook_last(parameter: nn.Parameter, handle: RemovableHandle) -> bool:
    """Move a post-accumulate-grad hook behind all other hooks of a parameter; return True if it was there already."""
    hooks: dict[int, Callable[..., None]] = parameter._post_accumulate_grad_hooks
    if next(reversed(hooks)) == handle.id:
        return True
    hooks[handle.id] = hooks.pop(handle.id)
    return False


def storage_id(tensor: Tensor) -> int:
    """Return an integer that identifies a tensor's storage as long as the storage exists."""
    # data_ptr is no identity, because it is 0 for every freed storage. See [Note: storage].
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int:
    """Return the number of references to a tensor's storage, including those of views, ``.data`` and NumPy arrays."""
    # Subtract the reference of the temporary object that untyped_storage() returns.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def is_aliased(tensor: Tensor) -> bool:
    """Return True if anything except this tensor refers to its storage."""
    return storage_uses(tensor) > 1


def is_dtensor(tensor: Tensor) -> bool:
    """Return True if a tensor is a DTensor, without importing that class, because the import takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


# PyTorch 2.13 renamed both functions and warns at each use of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# FSDP2 preserves the counter over a gather, so that autograd sees no change. zeropp sets it, so that autograd detects
# weights of an older step. See [Note: versions].
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter
"""Function that sets autograd's version counters of tensors. Autograd raises in backward for tensors saved at another
version."""


def sharing_versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the positions of tensors that share autograd's version counter with a later tensor, as views do."""
    before = [tensor._version for tensor in tensors]
    # Set each tensor's counter to its position. Tensors with a shared counter all show the position of the last of
    # them.
    set_versions(tuple(tensors), tuple(range(len(tensors))))
    sharing = [position for position, tensor in enumerate(tensors) if tensor._version != position]
    set_versions(tuple(tensors), tuple(before))
    return sharing


def chosen_timeout(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return the timeout of a group's collectives on a device, in seconds, if it is not PyTorch's default.

    Returns:
        None if the timeout is PyTorch's default or unknown.
    """
    c10d = dist.distributed_c10d
    defaults = (c10d.default_pg_timeout, getattr(c10d, "default_pg_nccl_timeout", None))
    timeout = group_timeout(group, device)
    return None if timeout in [each.total_seconds() for each in defaults if each is not None] else timeout


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Return the timeout of a group's collectives on a device, in seconds; None if it is unknown."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    # Process groups written in Python have no backends, and some backends have no options.
    except (AttributeError, RuntimeError):
        return None


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return True if PyTorch still has a group in its table. Destroying the default group clears the table."""
    return group in dist.distributed_c10d._world.pg_map


def current_graph_task() -> int:
    """Return the id of the backward pass that this thread runs; -1 outside of a backward."""
    # The id is thread-local. Autograd's threads, which run the hooks for a GPU, have it set, too.
    return torch._C._current_graph_task_id()


def queue_end_of_backward(
    callback: Callable[[], None], dropped: Callable[[], None] | None = None
) -> weakref.ref[Callable[[], None]]:
    """Register a callback for the end of the running backward pass. Call it only inside a backward.

    Args:
        callback: called once, when the backward has computed all gradients; not called if the backward fails.
        dropped: bound method that is called after the callback, and also after a failed backward. Its object is held
            weakly. The method must not block.

    Returns:
        A weak reference that is dead as soon as the backward has ended, also if it has failed.
    """
    # Only autograd holds this object, and drops it when the backward ends.
    ending = partial(callback)
    Variable._execution_engine.queue_callback(ending)
    if dropped is None:
        return weakref.ref(ending)
    told = weakref.WeakMethod(dropped)
    return weakref.ref(ending, lambda ref: (method := told()) and method())


def will_execute(node: Node) -> bool:
    """Return True if the running backward will execute a node of the graph.

    Inside ``torch.autograd.grad`` the result is True for every leaf whose gradient is requested, because PyTorch raises
    an error for such a leaf.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # PyTorch raises for a leaf whose gradient is requested from autograd.grad. The backward computes that gradient.
        return True


def goes_on() -> bool:
    """Return True if the running backward continues behind the tensor whose hook calls this function.

    The backward does not continue if ``torch.autograd.grad`` computes the gradient of that tensor, and of no tensor
    behind it. It continues if the next node is a leaf whose gradient is requested: see :func:`will_execute`.
    """
    node = cast("Node | None", torch._C._current_autograd_node())
    return node is None or any(will_execute(each) for each, _ in node.next_functions if each is not None)


def leaves_out(parameters: Iterable[Tensor]) -> bool:
    """Return True if the running backward computes gradients of given inputs only, and none of ``parameters``.

    This is the case in ``torch.autograd.grad``, which accumulates nothing, and in ``backward(inputs=...)`` if no
    parameter is among the inputs.
    """
    if any(_accumulates(parameter) for parameter in parameters):
        return False
    # No parameter gets a gradient, which is also possible if the loss does not depend on them. So search for a
    # reachable node that is not executed: a backward without ``inputs`` executes every node that it can reach.
    seen = set[Node]()
    left = [cast("Node | None", torch._C._current_autograd_node())]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        try:
            if not torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # PyTorch raises for a leaf whose gradient is requested from autograd.grad
            return True
        left += [following for following, _ in node.next_functions]
    return False


def _accumulates(parameter: Tensor) -> bool:
    """Return True if the running backward accumulates into ``.grad`` of a leaf."""
    with unguarded():
        node = get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad returns this gradient instead of accumulating it
        return False


def uncompiled(function: _F) -> _F:
    """Decorator that excludes a Python function, and all functions that it calls, from ``torch.compile``.

    A compiled caller gets a graph break at the call. If autograd calls the function as a hook, Dynamo does not compile
    it. ``torch.compiler.disable`` does the same with a wrapper, which takes half a microsecond per call. This decorator
    marks the function's code object instead, which costs nothing per call.
    """
    action = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(
        function.__code__,
        eval_frame._FrameExecStrategy(action, action),
    )
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for a caller that is compiled
    return function


def makes_graph() -> bool:
    """Return True while ``torch.compile`` traces a graph in this thread; False while compiled code runs."""
    return CompileContext.try_get() is not None


def break_graph(reason: str) -> NoReturn:
    """Make a graph break in the graph that ``torch.compile`` is tracing.

    Later code gets a separate graph or runs eagerly.

    Args:
        reason: explanation for the message of a compilation with ``fullgraph=True``.
    """
    torch._dynamo.exc.unimplemented(gb_type="zeropp", context="", explanation=reason, hints=[])


def compiles_backwards() -> bool:
    """Return True if compiled autograd is on. It would trace the next backward and run hooks in another order."""
    # Compiled autograd is off if its module has not been imported.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module's whole forward was compiled with ``torch.compile`` or ``module.compile``."""
    # Compare the class by name, because importing torch._dynamo takes long.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def replays_cuda_graphs(module: nn.Module) -> bool:
    """Return True if a module is compiled to CUDA graphs, by ``mode="reduce-overhead"`` or a similar setting."""
    if not is_compiled(module):
        return False
    chosen: dict[str, Any] | None
    if (call := getattr(module, "_compiled_call_impl", None)) is not None:
        # If compilation is disabled, this is a plain function without a configuration.
        config = getattr(call, "get_compiler_config", None)
        chosen = config() if config is not None else None
        backend = None
    else:
        context: Any = module.dynamo_ctx
        chosen, backend = context.compiler_config, context.callback
    # The backend "cudagraphs" has no configuration, so detect it by name. Wrappers around a backend store it in
    # _torchdynamo_orig_backend. For module.compile() the backend is not accessible.
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return bool((chosen or {}).get("triton.cudagraphs")) or getattr(backend, "compiler_name", "") == "cudagraphs"


def loss_scale(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    """Return the loss scale of a GradScaler as a float32 scalar on ``device``, without waiting for the device."""
    # Before the first loss is scaled, the tensor is None. get_scale() then returns the initial scale without a device
    # read.
    scale = scaler._get_scale_async() if scaler.is_enabled() else None
    value = torch.full((), scaler.get_scale(), device=device) if scale is None else scale.to(device)
    return value.reshape(())


def has_step_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if hooks run after a step of an optimizer: its own hooks, or the global hooks of all optimizers."""
    return bool(optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of a group for each device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``.

    ``dist.get_backend`` does not help here: after a plain ``init_process_group()`` it returns "undefined".
    """
    config: str = dist.distributed_c10d.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    pairs = (entry.partition(":") for entry in config.split(","))
    return {device: backend for device, _, backend in pairs}


def sends_from_host(group: dist.ProcessGroup) -> bool:
    """Return True if a group uses gloo for tensors in host memory."""
    try:
        # Check the backend object, too: a backend written in Python replaces the configured ones.
        return backends(group).get("cpu") == "gloo" and group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


def default_store() -> dist.Store:
    """Return the key-value store of the default process group.

    Raises:
        RuntimeError: the default process group has been destroyed.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed was ended, and the store of the job with it")
    return dist.distributed_c10d._get_default_store()


def new_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta,
    name: str,
    device: torch.device,
    max_ctas: int | None = None,
    *,
    lazily: bool = False,
) -> dist.ProcessGroup:
    """Create a process group. Only its members call this function.

    ``dist.new_group`` names a group by the number of groups that the rank has. Ranks with different numbers, or a group
    that was destroyed before, lead to wrong or reused names, and the ranks hang. Here the caller gives the name.

    Args:
        ranks: global ranks of the members, in the order of their group ranks.
        backend: name of the backend, as in ``dist.new_group``.
        timeout: timeout of the group's collectives.
        name: name of the group: equal on all members and never used before in this job.
        device: device of the tensors to communicate. With NCCL the members connect at once instead of in their first
            collective, which may be in the middle of a step.
        max_ctas: largest number of thread blocks of an NCCL kernel; None for NCCL's default.
        lazily: True for gloo to connect two members only when one first sends to the other.
    """
    c10d = dist.distributed_c10d
    default = c10d._get_default_group()
    # If the default group is bound to a device, NCCL would create this group by splitting the default one, which needs
    # a call on all ranks. So unbind it meanwhile.
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        with _lazy_gloo() if lazily else contextlib.nullcontext():
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                list(ranks).index(dist.get_rank()),
                list(ranks),
                dist.Backend(backend),
                default_store(),
                cast(Any, name),  # PyTorch 2.13 has a separate type for names, which is a str at run time
                _nccl_options(timeout, max_ctas) if backend == "nccl" and max_ctas is not None else None,
                timeout=timeout,
                group_desc=name,
                # Pass the device to NCCL only: with a device, PyTorch uses functions that backends in Python lack.
                device_id=device if backend == "nccl" else None,
            )
    finally:
        default.bound_device_id = bound
    # dist.new_group makes this entry after calling the helper. Collectives need it to translate global ranks.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


@contextlib.contextmanager
def _lazy_gloo() -> Iterator[None]:
    """Make gloo groups that are created inside this context connect two members at their first message."""
    # PyTorch reads this environment variable for each gloo group and has no argument for it.
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCH_GLOO_LAZY_INIT"]
        else:
            os.environ["TORCH_GLOO_LAZY_INIT"] = before


def _nccl_options(timeout: timedelta, max_ctas: int) -> Any:
    """Return PyTorch's default options of an NCCL communicator, with a limit on its thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    # The group's timeout is used in any case. But PyTorch warns if the one in the options differs.
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    return options


# Fused optimizer steps, which change lists of tensors in place. The type is loose, because the stubs have one overload
# for each type of lr.
fused_adam: Callable[..., None] = torch._fused_adam_
fused_adamw: Callable[..., None] = torch._fused_adamw_
fused_sgd: Callable[..., None] = torch._fused_sgd_
fused_adagrad: Callable[..., None] = torch._fused_adagrad_


@contextlib.contextmanager
def one_intra_op_thread() -> Iterator[None]:
    """Limit CPU kernels that this thread calls inside the context to one intra-op thread. Other threads are unaffected.

    ``torch.set_num_threads`` does not work for this, because it also changes the number for threads that start later,
    such as autograd's. The context has no effect if PyTorch is built without OpenMP; all official wheels use OpenMP.
    """
    # Read the number first: a thread's first read or use sets its number to that of the process.
    before = torch.get_num_threads()
    choose = _openmp() if before > 1 else None
    if choose is None:
        yield
        return
    choose(1)
    try:
        yield
    finally:
        choose(before)


@cache
def _openmp() -> Callable[[int], object] | None:
    """Return ``omp_set_num_threads`` of the OpenMP runtime that PyTorch uses; None if it is not found.

    This function sets the number of threads for the calling thread only.
    """
    before = torch.get_num_threads()
    # A process may have loaded several OpenMP runtimes. Try the global symbols first, because a runtime in LD_PRELOAD
    # is the one that PyTorch uses, too. Then check that the found function affects PyTorch.
    for library in (None, torch._C.__file__):
        choose: Callable[[int], object] | None = getattr(ctypes.PyDLL(library), "omp_set_num_threads", None)
        if choose is None:
            continue
        choose(before + 1)
        found = torch.get_num_threads() == before + 1
        choose(before)
        if found:
            return choose
    return None
