"""``Init`` and ``MiCS_Init``: blocks in which modules that are built are partitioned over the ranks."""

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
    """Inside ``with``, the parameters of modules that are built are partitioned over the ranks as they come.

    Collective: every rank runs the same code. No rank has the whole model at any time: a module's parameters are cut
    once its parent has it, and code that touches one later, to initialise it, gets it whole for that long. Rank 0's
    values become everyone's, so weights are those that the same code gives rank 0 without this. Small parameters
    (65,536 elements) stay whole, buffers too. Parameters on the meta device stay there.

    Between the block and ``ZeroOptimizer(optimizer, model, config)`` values can be read and edited inside
    :class:`zeropp.zero.GatheredParameters`, on one rank, too.
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
        """Prepare; and partition ``module``, if there is one. Names and defaults are those of ``deepspeed.zero.Init``.

        Args:
            module: partition this model at once, as if it had been built inside.
            data_parallel_group: ranks to partition among; None for the world.
            sequence_data_parallel_group: takes the place of the former where sequences are split over ranks, too.
            mem_efficient_linear: nothing is left to do: no layer keeps gathered weights until backward.
            remote_device: "cpu" for pieces in the host's memory until the model is wrapped, "nvme" for files below
                the configuration's ``offload_param.nvme_path``; None for the device of ``offload_param`` in the
                configuration, or else the one that trains.
            pin_memory: page-locked, with "cpu".
            config_dict_or_path: as for ZeroOptimizer, which must be given the same.
            config: an older name of it.
            enabled: False makes this do nothing.
            dtype: torch's default dtype inside, for main weights; the configuration says what the model computes in.
            mpu: asked for ``get_data_parallel_group()`` where there is no group.
            zero_param_parallel_group: of hpZ; ``zero_hpz_partition_size`` of the configuration must be its size.
            zero_quantized_weights, zero_quantized_nontrainable_weights: the configuration must say the same.

        Raises:
            ConfigError, TypeError, ValueError: an argument cannot be used; RuntimeError on the other ranks.
        """
        self._build: ShardedBuild | None = None
        self._stack = contextlib.ExitStack()
        self._built: WeakSet[nn.Module] = WeakSet()  # modules that another one has
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

        # What one rank refuses no other waits for.
        self._settings = run_on_all_ranks(group, "preparing zero.Init", choose, patience=lambda chosen: chosen.seconds)
        self._build = make_build(self._settings)
        if module is not None:
            self._partition(module, self._build)

    def _partition(self, module: nn.Module, build: ShardedBuild) -> None:
        with self:
            # All of it is there already, so nothing is cut before it is known that the pieces fit.
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
        # First, so that nothing is left of this whatever comes.
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
        assert self._build is not None  # hooks are there inside only
        if parameter is None:
            return
        # Alike on every rank, since all build the same.
        self._settings.limit.count_parameter(parameter)
        if module in self._built:
            # It has been initialised before: it is loaded, for one.
            self._build.ready([(f"{type(module).__name__}.{name}", parameter, module)])
        else:
            self._build.note_parameter(f"{type(module).__name__}.{name}", parameter, module)

    def _module_given(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        assert self._build is not None  # hooks are there inside only
        if child is not None:
            self._built.update(child.modules())
            self._build.ready(_named(child))


class MiCS_Init(Init):
    """As :class:`Init`, for models whose weights are spread over ``mics_shard_size`` ranks and have replicas beyond.

    While they are built they are spread over all ranks of the group, which takes less memory; the ZeroOptimizer, given
    the same configuration, spreads them over shard groups. Source: Zhang et al., MiCS, VLDB 2022.
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
        """As for :class:`Init`.

        Raises:
            ValueError: no configuration, or one without ``mics_shard_size``.
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
    """Connect the ranks that build together. Collective."""
    carrier = BuildComm(settings.group, settings.trains_on, settings.seconds)
    keep = _in_files(settings.swap) if settings.swap is not None else partial(_in_memory, settings)
    return ShardedBuild(carrier, settings.trains_on, settings.asked, keep)


def _in_memory(settings: InitSettings, row: Tensor) -> Tensor:
    # A copy, if it is one, of one message: many small pieces share it.
    row = row.to(settings.device)
    return row.pin_memory() if settings.pinned else row


def _in_files(nvme_path: Path) -> Callable[[Tensor], Tensor]:
    """A function that puts pieces into one swap file, whose space is freed with the last of them."""
    swap = SwapFile(nvme_path)

    def keep(row: Tensor) -> Tensor:
        # Through the page cache, which the system writes back as it needs the memory.
        return swap.allocate(row.numel(), row.dtype).tensor.copy_(row)

    return keep


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Parameters of a module and those below, and whose they are; the model's names are not known yet."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                yield f"{type(each).__name__}.{name}", parameter, each


@contextlib.contextmanager
def _gathering_for_copies(build: ShardedBuild) -> Iterator[None]:
    """While ``nn.Parameter(p)`` fetches a parameter that is in pieces, as torch's parametrizations need.

    Else torch asks for ``p.detach()``, and refuses a plain tensor in the place of a subclass.
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
    """While ``Module.apply`` fetches a module's own parameters together before it is given to the function."""
    plain = nn.Module.apply

    def apply(module: _M, fn: Callable[[nn.Module], None]) -> _M:
        # As the plain one, by children's own apply, which may be one of theirs.
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
