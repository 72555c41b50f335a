"""Functions of torch that are private or have been renamed, in one place; FSDP2's are in fsdp2/shards.py.

Attributes with an underscore that modules, parameters and optimizers of torch carry (``_parameters``, ``_version``,
``_optimizer_step_pre_hooks``) are read where they are about something.
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

__all__ = [
    "all_gather_single",
    "backends",
    "break_graph",
    "bump_versions",
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
    "queue_end_of_backward",
    "reduce_scatter_single",
    "replays_cuda_graphs",
    "sends_from_host",
    "sharing_versions",
    "storage_id",
    "storage_uses",
    "uncompiled",
    "unguarded",
    "will_execute",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# Only what subclasses do is off: modes stay on inside, such as the one that watches what is computed from gathered
# values.
unguarded = torch._C.DisableTorchFunctionSubclass
"""Inside, released parameters answer as tensors, and not by the guard."""

profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Tells whether a profile is being recorded."""


def storage_id(tensor: Tensor) -> int:
    """Identity of a tensor's storage, the same as long as the storage lives."""
    # Not data_ptr, which is 0 for every storage that is released. See [Note: storage].
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int:
    """The number of references to a tensor's memory: its own, and those of views, ``.data`` and arrays of NumPy."""
    # One more is that of the object which is asked here.
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def is_aliased(tensor: Tensor) -> bool:
    """Tell whether anything but this tensor refers to its memory."""
    return storage_uses(tensor) > 1


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor, without importing the class: its module takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


# torch 2.13 renamed both and warns at each use of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bump_versions(tensors: Sequence[Tensor], version: int) -> None:
    """Set autograd's version counters, so that a tensor saved at another version is refused in backward."""
    # FSDP2 keeps the counter as it was over a gather, so that autograd sees no edit. Here an older weight must be
    # seen. See [Note: versions].
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), (version,) * len(tensors))


def sharing_versions(tensors: Sequence[Tensor]) -> list[int]:
    """Positions of tensors that share autograd's version counter with a later one, as views of one tensor do."""
    before = [tensor._version for tensor in tensors]
    # Each is given a number of its own; where a counter is shared, the last one's is found in all.
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(range(len(tensors))))
    sharing = [position for position, tensor in enumerate(tensors) if tensor._version != position]
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(before))
    return sharing


def chosen_timeout(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Seconds after which a group's collectives on a device fail, if somebody chose other than torch's default.

    None, too, if it has none there.
    """
    c10d = dist.distributed_c10d
    defaults = (c10d.default_pg_timeout, getattr(c10d, "default_pg_nccl_timeout", None))
    timeout = group_timeout(group, device)
    return None if timeout in [each.total_seconds() for each in defaults if each is not None] else timeout


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Seconds after which a group's collectives on a device fail; None if it does not say."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a group that is written in Python has no backends, and some no options
        return None


def is_registered(group: dist.ProcessGroup) -> bool:
    """Tell whether torch still knows a group: it forgets all when the default group is destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def current_graph_task() -> int:
    """Identity of the backward pass this thread is in; -1 outside of any."""
    # This thread's: autograd's own threads, which run hooks on a card, have it set as well.
    return torch._C._current_graph_task_id()


def queue_end_of_backward(
    callback: Callable[[], None], dropped: Callable[[], None] | None = None
) -> weakref.ref[Callable[[], None]]:
    """Call ``callback`` when the running backward pass has computed everything. Only inside a backward.

    Args:
        callback: called once, unless the backward fails.
        dropped: a method, not kept alive; called after that, and where the backward has failed. It may not wait.

    Returns:
        A reference that is dead once that backward is over: one that fails drops what it was to call.
    """
    ending = partial(callback)  # an object that autograd alone holds
    Variable._execution_engine.queue_callback(ending)
    if dropped is None:
        return weakref.ref(ending)
    told = weakref.WeakMethod(dropped)
    return weakref.ref(ending, lambda ref: (method := told()) and method())


def will_execute(node: Node) -> bool:
    """Tell whether the running backward comes to a node of the graph; a leaf's counts as one in ``autograd.grad``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # There torch does not tell for leaves. Most often they are what the gradients are asked for.
        return True


def goes_on() -> bool:
    """Tell, in a tensor's hook, whether the running backward goes on into what made the tensor.

    It does not where ``torch.autograd.grad`` was asked for the gradient of that very tensor. Leaves count as in
    :func:`will_execute`.
    """
    node = cast("Node | None", torch._C._current_autograd_node())
    return node is None or any(will_execute(each) for each, _ in node.next_functions if each is not None)


def leaves_out(parameters: Iterable[Tensor]) -> bool:
    """Tell whether the running backward was asked for gradients of some tensors, none of ``parameters`` among them.

    So it is in ``torch.autograd.grad``, which accumulates nothing, and in ``backward(inputs=...)``.
    """
    if any(_accumulates(parameter) for parameter in parameters):
        return False
    # Perhaps the loss just does not depend on them. But without ``inputs`` a backward executes all that it can reach.
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
        except RuntimeError:  # a leaf in autograd.grad
            return True
        left += [following for following, _ in node.next_functions]
    return False


def _accumulates(parameter: Tensor) -> bool:
    """Tell whether the running backward adds to ``.grad`` of a leaf."""
    with unguarded():
        node = get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad was asked for it, and returns it
        return False


def uncompiled(function: _F) -> _F:
    """Keep ``torch.compile`` out of a Python function and of all that it calls: a decorator.

    A compiled function may call it, and has a graph break there. Autograd may call it as a hook of a backward that a
    compiled function runs; Dynamo would compile such a hook when it begins. ``torch.compiler.disable`` does the same by
    a wrapper that takes half a microsecond a call; here the mark is on the code, and a call takes no longer.
    """
    action = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(
        function.__code__,
        eval_frame._FrameExecStrategy(action, action),
    )
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for a caller that is compiled
    return function


def makes_graph() -> bool:
    """Tell whether ``torch.compile`` is making a graph in this thread now; not while a compiled function runs."""
    return CompileContext.try_get() is not None


def break_graph(reason: str) -> NoReturn:
    """End the graph that ``torch.compile`` is making here: what follows runs uncompiled, or is compiled apart."""
    torch._dynamo.exc.unimplemented(gb_type="zeropp", context="", explanation=reason, hints=[])


def compiles_backwards() -> bool:
    """Tell whether compiled autograd is on: it traces a backward that begins now, and runs hooks in another order."""
    # Only who turns it on imports it.
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` or ``module.compile`` made this module's forward one compiled region."""
    # By its name: the class is in torch._dynamo, which takes long to import.
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def replays_cuda_graphs(module: nn.Module) -> bool:
    """Tell whether a compiled module is to run as CUDA graphs: ``mode="reduce-overhead"`` or one of its kin."""
    if not is_compiled(module):
        return False
    chosen: dict[str, Any] | None
    if (call := getattr(module, "_compiled_call_impl", None)) is not None:
        # A plain function where compiling is switched off.
        config = getattr(call, "get_compiler_config", None)
        chosen = config() if config is not None else None
        backend = None
    else:
        context: Any = module.dynamo_ctx
        chosen, backend = context.compiler_config, context.callback
    # The backend of that name has no settings; what wraps it keeps it there. In ``_compiled_call_impl`` nothing does.
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return bool((chosen or {}).get("triton.cudagraphs")) or getattr(backend, "compiler_name", "") == "cudagraphs"


def loss_scale(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    """The factor that a scaler puts on losses, float32 scalar; the host does not wait for it."""
    # None before the first loss is scaled: get_scale() has the number then, and reads no device.
    scale = scaler._get_scale_async() if scaler.is_enabled() else None
    value = torch.full((), scaler.get_scale(), device=device) if scale is None else scale.to(device)
    return value.reshape(())


def has_step_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether hooks run behind a step of an optimizer: its own, or those of all optimizers."""
    return bool(optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks)


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for the tensors of each type of device.

    ``dist.get_backend`` repeats what the group was made with: "undefined" after a plain ``init_process_group()``.
    """
    config: str = dist.distributed_c10d.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    pairs = (entry.partition(":") for entry in config.split(","))
    return {device: backend for device, _, backend in pairs}


def sends_from_host(group: dist.ProcessGroup) -> bool:
    """Tell whether a group has gloo for tensors in the host's memory."""
    try:
        # Asked, too: a backend written in Python takes the place of all others, whatever the configuration says.
        return backends(group).get("cpu") == "gloo" and group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


def default_store() -> dist.Store:
    """The key-value store behind the default process group.

    Raises:
        RuntimeError: there is no process group any more.
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
    """A process group of global ranks, numbered in the order given; only its members call.

    ``dist.new_group`` numbers groups by how many a rank has, so that ranks with different histories, or a group made
    after another was destroyed, meet under a wrong or a used name and hang. Here the caller gives the name.

    Args:
        ranks: members.
        backend: as in ``dist.new_group``.
        timeout: of its collectives.
        name: never used before in this job, the same on every member.
        device: whose tensors it will carry. On an accelerator the members connect now, and not in their first
            collective, which may be in the middle of a step.
        max_ctas: thread blocks that NCCL's kernels may have at most; None for its own choice.
        lazily: over gloo, two members connect when one of them first sends to the other.
    """
    c10d = dist.distributed_c10d
    default = c10d._get_default_group()
    # Bound to a device, the default group would be split for this one by NCCL, which needs its other ranks, too.
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        with _lazy_gloo() if lazily else contextlib.nullcontext():
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                list(ranks).index(dist.get_rank()),
                list(ranks),
                dist.Backend(backend),
                default_store(),
                cast(Any, name),  # torch 2.13 has a type of its own for names, a str underneath
                _nccl_options(timeout, max_ctas) if backend == "nccl" and max_ctas is not None else None,
                timeout=timeout,
                group_desc=name,
                # Backends written in Python are asked for what they do not have, if a device is named.
                device_id=device if backend == "nccl" else None,
            )
    finally:
        default.bound_device_id = bound
    # The helper leaves this to dist.new_group; without it no collective could translate a global rank.
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


@contextlib.contextmanager
def _lazy_gloo() -> Iterator[None]:
    """Let gloo groups that are made inside connect members in pairs, when they first send to each other."""
    # torch asks for the variable each time it makes such a group, and has no argument for it.
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
    """Settings of an NCCL communicator, as torch makes them for a group without any, but for the limit."""
    options = dist.ProcessGroupNCCL.Options()
    # torch warns where this differs from the group's, although the group's is used.
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    return options


# They step lists of tensors in place. Untyped: the stubs have one overload for each kind of lr.
fused_adam: Callable[..., None] = torch._fused_adam_
fused_adamw: Callable[..., None] = torch._fused_adamw_
fused_sgd: Callable[..., None] = torch._fused_sgd_
fused_adagrad: Callable[..., None] = torch._fused_adagrad_


@contextlib.contextmanager
def one_intra_op_thread() -> Iterator[None]:
    """Inside, kernels that this thread calls run in this thread alone; the numbers of other threads stay as they are.

    ``torch.set_num_threads`` would also set the number with which threads of the process begin from then on, such as
    autograd's. Without effect where torch is built with another runtime than OpenMP; none of its wheels is.
    """
    # Asked first: a thread takes over the number of the process when it is asked or used for the first time.
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
    """OpenMP's function that sets the number of threads for the calling thread alone, of the runtime torch uses."""
    before = torch.get_num_threads()
    # A process may hold several runtimes. What is loaded for all comes first, as it did for torch: LD_PRELOAD.
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
