"""``Init`` and ``MiCS_Init``: contexts in which newly built modules are sharded over the ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeropp.comm.collective import BuildComm, run_on_all_ranks
from zeropp.comm.process_groups import Group
from zeropp.config import ConfigSource, load_config
from zeropp.init.settings import InitSettings, choose_group, choose_settings
from zeropp.offload.swap import SwapFile
from zeropp.params.sharded_build import ShardedBuild

__all__ = ["Init", "MiCS_Init"]

_M = TypeVar("_M", bound=nn.Module)
_FLAGS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")


class Init:
    """Context manager that shards the parameters of modules over the ranks while the modules are built.

    Collective: all ranks run the same code inside. No rank holds the whole of a large model at any time: the parameters
    of a module may be sharded once the module is assigned to its parent. Code that accesses a sharded parameter inside
    the context, such as an initialisation, gets the whole values, and its edits are kept. All ranks get rank 0's
    values, so the weights are those that rank 0 would get without this context. Module buffers and small parameters (up
    to 65,536 elements each, 64 MiB in all) stay whole. Parameters on the meta device stay there.

    Between this context and ``ZeroOptimizer(optimizer, model, config)``, values can be read and edited inside
    :class:`zeropp.zero.GatheredParameters`.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Group = None,
        sequence_data_parallel_group: Group = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: ConfigSource = None,
        config: ConfigSource = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Group = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
    ) -> None:
        """Prepare the context, and shard ``module`` if given. Names and defaults are those of ``deepspeed.zero.Init``.

        Args:
            module: model to shard at once, as if it had been built inside the context.
            data_parallel_group: ranks to shard over; None for all ranks.
            sequence_data_parallel_group: ranks to shard over if sequences are split over ranks, too.
            mem_efficient_linear: without effect: no layer of zeropp holds gathered weights until backward.
            remote_device: storage of the shards until wrapping: "cpu" for host memory, "nvme" for files in the
                configured ``offload_param.nvme_path``, None for ``offload_param.device`` or else the training device.
            pin_memory: True for page-locked memory, with remote_device "cpu".
            config_dict_or_path: configuration as for ZeroOptimizer, which must get the same one.
            config: deprecated name of ``config_dict_or_path``.
            enabled: False makes the context do nothing.
            dtype: PyTorch's default dtype inside, for the built weights. The configuration sets the compute dtype.
            mpu: object whose ``get_data_parallel_group()`` returns the ranks, if no group is given.
            zero_param_parallel_group: process group of hpZ, of size ``zero_hpz_partition_size`` in the configuration.
            zero_quantized_weights, zero_quantized_nontrainable_weights: True requires the same key in the
                configuration.

        Raises:
            ConfigError, TypeError, ValueError: an argument is invalid. The other ranks raise RuntimeError.
        """
        self._build: ShardedBuild | None = None
        self._stack = contextlib.ExitStack()
        self._built: WeakSet[nn.Module] = WeakSet()  # modules that have been assigned to a parent
        if not enabled:
            return
        group = choose_group(data_parallel_group, sequence_data_parallel_group, mpu)
        flags = (zero_quantized_weights, zero_quantized_nontrainable_weights)

        def choose() -> InitSettings:
            _check_arguments(module, data_parallel_group, sequence_data_parallel_group)
            return choose_settings(
                group=group, remote_device=remote_device, pin_memory=pin_memory,
                config_dict_or_path=config_dict_or_path, config=config, dtype=dtype,
                hpz_group=zero_param_parallel_group, asked=dict.fromkeys(itertools.compress(_FLAGS, flags), True),
            )  # fmt: skip

        # If one rank rejects its arguments, all ranks raise, and none waits for that rank.
        self._settings = run_on_all_ranks(group, "preparing zero.Init", choose, patience=lambda chosen: chosen.seconds)
        self._build = make_build(self._settings)
        if module is not None:
            self._partition(module, self._build)

    def _partition(self, module: nn.Module, build: ShardedBuild) -> None:
        with self:
            # The whole module exists already, so check that all shards fit before the first one is made.
            self._settings.limit.require(each for each in module.parameters() if not each.is_meta)
            build.ready(_named(module))

    def __enter__(self) -> None:
        if self._build is None:
            return
        dtype, build = self._settings.dtype, self._build
        if build.building:
            raise RuntimeError("this zero.Init was entered inside its own block; make another one")
        if dtype is not None:
            before = torch.get_default_dtype()
            self._stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(dtype)
        for handle in (
            register_module_parameter_registration_hook(self._parameter_given),
            register_module_module_registration_hook(self._module_given),
        ):
            self._stack.callback(handle.remove)
        self._stack.enter_context(_gathering_for_copies(build))
        if self._settings.gathers_in_apply:
            self._stack.enter_context(_gathering_apply(build))
        build.building = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Remove the hooks first, so that they are removed even if a later line raises.
        self._stack.close()
        if self._build is None:
            return
        self._built.clear()
        self._settings.limit.drop_counts()
        if error is None:
            self._build.finish_build()
        else:
            self._build.end_build()
            self._build.report_failure(error)

    def _parameter_given(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        assert self._build is not None  # the hook is registered inside the context only
        if parameter is None:
            return
        # All ranks build the same model, so the limit raises on all ranks or on none.
        self._settings.limit.count_parameter(parameter)
        if module in self._built:
            # The module is complete already, so this parameter has its values, for example from loading.
            self._build.ready([(f"{type(module).__name__}.{name}", parameter, module)])
        else:
            self._build.note_parameter(f"{type(module).__name__}.{name}", parameter, module)

    def _module_given(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        assert self._build is not None  # the hook is registered inside the context only
        if child is not None:
            self._built.update(child.modules())
            self._build.ready(_named(child))


class MiCS_Init(Init):
    """:class:`Init` for MiCS: each replica of the model is sharded over ``mics_shard_size`` ranks.

    While the model is built, it is sharded over all ranks of the group, which takes less memory. The ZeroOptimizer,
    with the same configuration, then shards it over groups of ``mics_shard_size`` ranks. Source: Zhang et al., MiCS,
    VLDB 2022.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Group = None,
        sequence_data_parallel_group: Group = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: ConfigSource = None,
        config: ConfigSource = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        """Prepare the context, with the arguments of :class:`Init`.

        Raises:
            ValueError: there is no configuration, or it has no ``mics_shard_size``.
        """
        given = config if config_dict_or_path is None else config_dict_or_path
        if enabled and (given is None or load_config(given, final=False).zero.mics_shard_size <= 0):
            raise ValueError(
                'MiCS_Init needs a configuration with mics_shard_size; give config_dict_or_path={"zero_optimization": '
                '{"stage": 3, "mics_shard_size": ...}}, or use Init'
            )
        super().__init__(
            module, data_parallel_group, sequence_data_parallel_group, mem_efficient_linear, remote_device, pin_memory,
            config_dict_or_path, config, enabled, dtype, mpu,
        )  # fmt: skip


def _check_arguments(module: object, data_parallel_group: Group, sequence_data_parallel_group: Group) -> None:
    if data_parallel_group is not None and sequence_data_parallel_group is not None:
        raise ValueError(
            "data_parallel_group and sequence_data_parallel_group are both given; the second takes the place of the "
            "first where sequences are split over ranks. Give one"
        )
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Module")


def make_build(settings: InitSettings) -> ShardedBuild:
    """Create the build object that shards and gathers parameters for a process group. Collective."""
    carrier = BuildComm(settings.group, settings.trains_on, settings.seconds)
    keep = _in_files(settings.swap) if settings.swap is not None else partial(_in_memory, settings)
    return ShardedBuild(carrier, settings.trains_on, settings.asked, keep)


def _in_memory(settings: InitSettings, row: Tensor) -> Tensor:
    # `row` is one shard, or a message with many small shards, which become views of the result.
    row = row.to(settings.device)
    return row.pin_memory() if settings.pinned else row


def _in_files(nvme_path: Path) -> Callable[[Tensor], Tensor]:
    """Return a function that moves shards to one swap file. The file's space is freed with the last shard."""
    swap = SwapFile(nvme_path)

    def keep(row: Tensor) -> Tensor:
        # The copy goes through the page cache. The operating system writes it to the file later, at the latest when it
        # needs the memory.
        return swap.allocate(row.numel(), row.dtype).tensor.copy_(row)

    return keep


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Iterate over the parameters of a module and its submodules.

    Yields:
        A name (class of the owning module and attribute, because the names in the model are not known yet), the
        parameter, and the owning module.
    """
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                yield f"{type(each).__name__}.{name}", parameter, each


@contextlib.contextmanager
def _gathering_for_copies(build: ShardedBuild) -> Iterator[None]:
    """Make ``nn.Parameter(p)`` gather a sharded parameter ``p`` first. PyTorch's parametrizations make such calls.

    Without this, ``nn.Parameter.__new__`` calls ``p.detach()`` on the guarded subclass, gets a plain tensor and raises
    an error.
    """
    plain: Callable[..., nn.Parameter] = vars(nn.Parameter)["__new__"]

    def new(cls: type[nn.Parameter], data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
        if not isinstance(data, nn.Parameter):
            return plain(cls, data, requires_grad)
        build.fetch([data])
        made = plain(cls, data, requires_grad)
        build.let_go()
        return made

    nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Parameter.__new__ = plain  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def _gathering_apply(build: ShardedBuild) -> Iterator[None]:
    """Make ``Module.apply`` gather a module's own parameters together before it calls the function with the module."""
    plain = nn.Module.apply

    def apply(module: _M, fn: Callable[[nn.Module], None]) -> _M:
        # Like the original, call apply of the children, which may override it.
        for child in module.children():
            child.apply(fn)
        build.fetch(parameter for parameter in module._parameters.values() if parameter is not None)
        fn(module)
        build.let_go()
        return module

    nn.Module.apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.apply = plain  # type: ignore[method-assign]
