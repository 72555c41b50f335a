"""One flat buffer: the parameters of a unit that share a dtype, as one contiguous stretch of memory.

[Note: storage] While gathered, parameters are views of the buffer's storage. Releasing shrinks that storage to nothing
and gathering grows it back, so that every alias autograd has saved sees the gathered values again; a new storage would
leave them behind.

[Note: versions] Shrinking under autograd's eyes must not go unnoticed. At weight version v a gathered parameter's
version counter is 2v, a released one's 2v+1: a saved tensor that is reached while its unit is away, or after an
optimizer step, is refused by autograd instead of read. A counter at any other value tells of an edit in place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeropp._compat import bump_versions
from zeropp.comm import Comm, GatherPath, ReducePath
from zeropp.guard import guard, unguard
from zeropp.layout import BufferLayout
from zeropp_kernels.reference import pack_

__all__ = ["FlatBuffer"]


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The value of every element of every released parameter."""
    return torch.full((), float("nan"), dtype=dtype, device=device)


class FlatBuffer:
    """Values, main shard and gradient shard of one group of parameters.

    Attributes:
        parameters: the model's own parameter objects.
        flat: [numel] in the compute dtype; empty storage while released.
        shard: [numel / world] main weights (float32, or float64 for float64 models), or the frozen values in their own
            dtype.
        grad: [numel / world] accumulated gradient in the main dtype, or None for frozen parameters.
    """

    def __init__(
        self,
        unit: str,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        layout: BufferLayout,
        main_dtype: torch.dtype,
        gather_path: GatherPath,
        reduce_path: ReducePath,
    ) -> None:
        self.unit = unit
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.layout = layout
        self.trainable = parameters[0].requires_grad
        self.device = parameters[0].device
        self.compute_dtype = gather_path.codec.dtype
        self.main_dtype = main_dtype
        self.gather_path = gather_path
        self.reduce_path = reduce_path
        self.version = 0
        self._noted_version = 0  # of autograd's counters, as last set here; an edit in place moves them
        placement = gather_path.placement
        self.piece = placement.chain.slice_index(placement.rank, layout.world)
        self.shard = torch.empty(0)
        self.grad: Tensor | None = None
        self.has_grad = False  # whether ``grad`` holds anything yet
        self.local: Tensor | None = None  # [numel] whole gradients kept back by no_sync, main dtype
        self._places = [(slot.shape, slot.strides, slot.offset) for slot in layout.slots]

    def adopt(self, comm: Comm) -> None:
        """Take rank 0's values, keep this rank's piece, and make the parameters views of the released buffer."""
        numel = self.layout.numel
        whole = torch.zeros(numel, dtype=self.main_dtype, device=self.device)
        with torch.no_grad():
            if comm.rank == 0:
                for view, parameter in zip(self.views(whole), self.parameters, strict=True):
                    view.copy_(parameter)
            comm.broadcast(whole)
            start, stop = self.layout.slice_range(self.piece, self.layout.world)
            self.shard = whole[start:stop].clone()
            del whole
            if self.trainable:
                self.grad = torch.zeros_like(self.shard)
            self.flat = torch.empty(numel, dtype=self.compute_dtype, device=self.device)
            self._gather_views = self.gather_path.views(self.flat)
            self._present = self.views(self.flat)
            nothing = _nothing(self.compute_dtype, self.device)
            self._absent = [nothing.expand(view.shape) for view in self._present]
        bump_versions(self.parameters, self._noted_version)
        self.cover()
        self.shrink()

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parameters' places in a buffer of [numel]."""
        return [whole.as_strided(shape, strides, offset) for shape, strides, offset in self._places]

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def storage_id(self) -> int:
        """Identity of the gathered buffer's storage, the same as long as the engine lives."""
        return int(self.flat.untyped_storage()._cdata)

    # Values: grow, gather, uncover; cover, shrink.

    def grow(self) -> None:
        """Have memory for the values."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def gather(self) -> None:
        """Bring the values together; on the gather stream."""
        self.gather_path.run(self.shard, self._gather_views, self.unit)

    def uncover(self) -> None:
        """Let the model see the values.

        Raises:
            RuntimeError: a parameter was edited while released.
        """
        unguard(self.parameters)
        self._swap(self._present, 2 * self.version)

    def cover(self) -> None:
        """Let no one read the values any more; see `zeropp.guard`.

        Raises:
            RuntimeError: a parameter was edited while gathered.
        """
        unguard(self.parameters)
        try:
            self._swap(self._absent, 2 * self.version + 1)
        finally:
            guard(self.parameters)

    def _swap(self, values: list[Tensor], version: int) -> None:
        edited = [n for n, p in zip(self.names, self.parameters, strict=True) if p._version != self._noted_version]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value
        bump_versions(self.parameters, version)
        self._noted_version = version
        if edited:
            raise RuntimeError(
                f"{edited} were edited in place, and the edit is lost: what a module sees is a copy of values that are "
                "partitioned over the ranks. To set weights use model.load_state_dict(...) on every rank, between steps"
            )

    def shrink(self) -> None:
        """Free the memory of the values; every reader must be done."""
        self.flat.untyped_storage().resize_(0)

    def load(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Take this rank's piece of new values for one of the parameters, if it is here."""
        for fragment in self.layout.fragments(self.piece):
            if self.parameters[fragment.slot] is parameter:
                shape, strides, _ = self._places[fragment.slot]
                dense = torch.empty_strided(shape, strides, dtype=self.main_dtype, device=self.device)
                dense.copy_(values)
                row = dense.as_strided((dense.numel(),), (1,))
                stop = fragment.offset + fragment.stop - fragment.start
                self.shard[fragment.offset : stop] = row[fragment.start : fragment.stop]

    # Gradients.

    def pack_gradients(self) -> Tensor:
        """This rank's whole gradient as one message in the wire dtype; takes ``.grad`` and what no_sync kept."""
        codec = self.reduce_path.codec
        gradients = self._take_gradients()
        if self.local is not None:
            self._add_local(gradients)
            message = codec.empty(self.layout.numel, self.device)
            codec.encode_(message, self.local)
            self.local = None
            return message
        message = codec.empty(self.layout.numel, self.device)
        pack_(self.views(message), gradients)
        for start, stop in self.layout.gaps:
            message[start:stop].zero_()
        return message

    def keep_gradients(self) -> None:
        """Add ``.grad`` to a whole gradient on this rank, in the main dtype, to be sent later."""
        gradients = self._take_gradients()
        if self.local is None:
            self.local = torch.zeros(self.layout.numel, dtype=self.main_dtype, device=self.device)
        self._add_local(gradients)

    def reduce(self, message: Tensor, scale: float) -> None:
        """Sum every rank's message into the gradient shard; on the reduce stream."""
        assert self.grad is not None
        self.reduce_path.run(message, self.grad, scale=scale, accumulate=self.has_grad, unit=self.unit)
        self.has_grad = True

    def has_unsent_gradients(self) -> bool:
        """Whether this rank holds gradients that no reduction has taken."""
        return self.trainable and (self.local is not None or self.has_stray_gradients())

    def has_stray_gradients(self) -> bool:
        """Whether gradients came that the known sequence did not expect; ``no_sync`` keeps its own elsewhere."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(parameter.grad is not None for parameter in self.parameters)

    def drop_gradients(self) -> None:
        """Forget gradients, sent or kept back; those that autograd is just bringing stay."""
        self.has_grad = False
        self.local = None

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        """Forget one parameter's gradient, sent or not."""
        assert self.grad is not None
        for index, other in enumerate(self.parameters):
            if other is parameter and self.local is not None:
                self.views(self.local)[index].zero_()
        for fragment in self.layout.fragments(self.piece):
            if self.parameters[fragment.slot] is parameter:
                self.grad[fragment.offset : fragment.offset + fragment.stop - fragment.start].zero_()
        with torch._C.DisableTorchFunctionSubclass():
            parameter.grad = None

    def drop_unsent(self) -> None:
        """Forget gradients that have not been sent."""
        self.local = None
        if self.trainable:
            self._take_gradients()

    def _take_gradients(self) -> list[Tensor | None]:
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return gradients

    def _add_local(self, gradients: list[Tensor | None]) -> None:
        assert self.local is not None
        views = self.views(self.local)
        present = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        if present:
            torch._foreach_add_([v for v, _ in present], [g.to(self.main_dtype) for _, g in present])
